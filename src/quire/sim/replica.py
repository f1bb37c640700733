"""`Replica`: a real `EngineCore` around a `SimExecutor`, stepped by the events of the virtual clock.

    live       begin() ── the process waits in collect() ── finish() ── begin() ── …
    simulated  begin()      other replicas, arrivals        finish() ── begin() ── …

As in the live loop, the inbox is not read while a step is awaited. `Timeline` samples all replicas over time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire.cache.events import EventBuffer
from quire.clock import VirtualClock
from quire.config import CacheConfig, SchedulerConfig
from quire.engine.core import EngineCore
from quire.executor.base import Executor
from quire.metrics.engine_stats import EngineStats
from quire.plan.cost_model import StepTime
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.slo import SloController
from quire.sim.executor import SimExecutor
from quire.sim.latency import Latency


class Replica:
    """One engine. ``on_submit`` is called with the time at which each of its steps will be over."""

    def __init__(
        self,
        number: int,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        latency: Latency,
        clock: VirtualClock,
        on_submit: Callable[[float], None],
        *,
        max_in_flight: int = 1,
        reports: bool = False,
        watch: Callable[[Executor], Executor] | None = None,
        tpot_s: float | None = None,
        step_time: StepTime | None = None,
    ) -> None:
        """``reports``: it keeps cache events for a router; ``watch`` wraps the executor."""
        self.number = number
        self.executor = SimExecutor(latency, clock, on_submit, max_in_flight=max_in_flight)
        events = EventBuffer() if reports else None
        executor = watch(self.executor) if watch else self.executor
        made = Scheduler(scheduler, cache, events, step_time=step_time)
        controller = None if tpot_s is None else SloController(made.predictor, scheduler, tpot_s)
        self.core = EngineCore(made, executor, clock, controller)

    @property
    def waits(self) -> bool:
        """Whether a step is in flight: the loop waits in `collect`."""
        return self.core.num_out > 0

    def stats(self) -> EngineStats:
        return self.core.stats()


_FIRST_INTERVAL_S = 0.1
_MOST_POINTS = 600


class Point(NamedTuple):
    """The cluster at one time; counts are those of all replicas together."""

    time_s: float
    num_running: int
    num_waiting: int
    kv_usage: float  # fraction of all blocks that sequences or steps hold
    num_output_tokens: int  # so far


class Timeline:
    """Points at even intervals. When there are too many, every other one is dropped and the interval doubles."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.next_s = 0.0
        self._interval_s = _FIRST_INTERVAL_S

    def sample(self, now: float, replicas: Sequence[Replica]) -> None:
        """Record the state at ``now``. Call it only from `next_s` on."""
        stats = [replica.stats() for replica in replicas]
        blocks = sum(s.num_blocks for s in stats)
        held = blocks - sum(s.num_free_blocks + s.num_idle_blocks for s in stats)
        self.points.append(
            Point(
                now,
                sum(s.num_running for s in stats),
                sum(s.num_waiting for s in stats),
                held / blocks,
                sum(s.num_generated_tokens for s in stats),
            )
        )
        if len(self.points) > _MOST_POINTS:
            del self.points[1::2]
            self._interval_s *= 2.0
        self.next_s = now + self._interval_s
