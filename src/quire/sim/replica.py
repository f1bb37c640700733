"""`Replica`: a real `EngineCore` around a `SimExecutor`, stepped by the virtual clock's heap.

    live       begin() ── the process waits in collect() ── finish() ── begin() ── …
    simulated  begin()      other replicas, arrivals        finish() ── begin() ── …

As in the live loop nothing is taken from the inbox while a step is awaited.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.cache.events import EventBuffer
from quire.clock import VirtualClock
from quire.config import CacheConfig, SchedulerConfig
from quire.engine.core import EngineCore
from quire.executor.base import Executor
from quire.metrics.engine_stats import EngineStats
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.slo import SloController
from quire.sim.executor import SimExecutor
from quire.sim.latency import Latency


class Replica:
    """One engine. ``on_submit`` is told when each of its steps will be over."""

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
        controller: SloController | None = None,
    ) -> None:
        """``reports``: it keeps cache events for a router; ``watch`` wraps the executor (`quire.sim.plan_hash`)."""
        self.number = number
        self.executor = SimExecutor(latency, clock, on_submit, max_in_flight=max_in_flight)
        events = EventBuffer() if reports else None
        executor = watch(self.executor) if watch else self.executor
        self.core = EngineCore(Scheduler(scheduler, cache, events), executor, clock, controller)

    @property
    def waits(self) -> bool:
        """Whether a step is out: the loop stands in `collect`."""
        return self.core.num_out > 0

    def stats(self) -> EngineStats:
        return self.core.stats()
