"""`Replica`: a real `EngineCore` around a `TimedExecutor`, stepped by the events of the virtual clock.

    live       begin() ── the process waits in collect() ── finish() ── begin() ── …
    simulated  begin()      other replicas, arrivals        finish() ── begin() ── …

As in the live loop, the inbox is not read while a step is awaited. `Timeline` samples all replicas over time.

At given times a replica dies, is slow for a while, or more replicas are started (`Fault`):

kill:at=30,replica=0              replica 0 dies at 30 s; a new one is ready after the start-up time
kill:at=30,replica=0,restart=no   the same without a replacement
slow:at=10,until=40,replica=1,factor=3
add:at=60,count=2                 two more replicas, ready after the start-up time
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quire.args import defaults
from quire.cache.events import EventBuffer
from quire.clock import VirtualClock
from quire.config import CacheConfig, SchedulerConfig
from quire.cost.cost_model import StepTime
from quire.engine.core import EngineCore
from quire.errors import ConfigError
from quire.executor.base import Executor
from quire.metrics.engine_stats import EngineStats
from quire.scheduler.policies.slo import SloController
from quire.scheduler.policies.stages import StageRows
from quire.scheduler.scheduler import Scheduler
from quire_gateway.config import RoutingArgs
from quire_lab.sim.disaggregated import Pools
from quire_lab.sim.drafts import SimulatedDrafts, Speculation
from quire_lab.sim.latency import Latency, Swap, sim_executor

_HOW = (
    "write kill:at=SECONDS,replica=N[,restart=no], slow:at=SECONDS,until=SECONDS,replica=N,factor=X or "
    "add:at=SECONDS,count=N"
)


@dataclass(frozen=True, slots=True)
class Kill:
    """The replica dies. Its requests in flight go to others, with the tokens that their clients already have."""

    at: float
    replica: int
    restart: bool = True


@dataclass(frozen=True, slots=True)
class Slow:
    """Steps submitted between ``at`` and ``until`` take ``factor`` times as long."""

    at: float
    until: float
    replica: int
    factor: float


@dataclass(frozen=True, slots=True)
class Add:
    """Start ``count`` more replicas."""

    at: float
    count: int = 1


Fault = Kill | Slow | Add


def parse_fault(text: str) -> Fault:
    """Read one fault; see the module.

    Raises:
        ConfigError: says what is wrong and how to write it.
    """
    kind, _, rest = text.partition(":")
    parts = dict(part.partition("=")[::2] for part in rest.split(",")) if rest else {}
    try:
        fault = _make(kind.strip(), {key.strip(): value.strip() for key, value in parts.items()})
    except ValueError:
        fault = None
    if fault is None:
        raise ConfigError(f"fault {text!r} is not understood: {_HOW}")
    return fault


def _make(kind: str, parts: dict[str, str]) -> Fault | None:
    match kind, parts:
        case "kill", {"at": at, "replica": replica, **rest} if rest in (
            {},
            {"restart": "no"},
            {"restart": "yes"},
        ):
            return Kill(_time(at), _index(replica), rest.get("restart") != "no")
        case "slow", {"at": at, "until": until, "replica": replica, "factor": factor} if len(parts) == 4:
            slow = Slow(_time(at), _time(until), _index(replica), float(factor))
            return slow if slow.until > slow.at and 0.0 < slow.factor < math.inf else None
        case "add", {"at": at, **rest} if rest.keys() <= {"count"}:
            count = int(rest.get("count", "1"))
            return Add(_time(at), count) if count > 0 else None
    return None


def _time(text: str) -> float:
    value = float(text.removesuffix("s"))
    if not 0.0 <= value < math.inf:
        raise ValueError(text)
    return value


def _index(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def check_faults(faults: Iterable[Fault], num_replicas: int) -> None:
    """Raise `ConfigError` where a fault names a replica that will not exist at its time."""
    known = num_replicas
    for fault in sorted(faults, key=lambda fault: fault.at):
        if isinstance(fault, Add):
            known += fault.count
        elif fault.replica >= known:
            raise ConfigError(
                f"fault {fault}: replica {fault.replica} does not exist then; there are {known}, from 0 on"
            )


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """What is simulated. Times are in seconds."""

    scheduler: SchedulerConfig
    cache: CacheConfig
    num_replicas: int = 1
    start_up_s: float = 0.0  # seconds for a replica that is added or replaces another
    routing: str = "least-loaded"
    max_load_ratio: float = defaults(RoutingArgs)["max_load_ratio"]
    max_in_flight: int = 1
    num_stages: int = 1  # pipeline stages: as many steps in flight, if more than 1
    stage_rows: StageRows | None = None  # decides the chunks of a pipeline
    speculation: Speculation | None = None
    swap: Swap | None = None  # None: a preempted sequence is computed again
    pools: Pools | None = None  # None: every replica computes prompts and decodes
    faults: tuple[Fault, ...] = ()
    tpot_s: float | None = None  # target of each controller, like ``quire serve --slo``
    request_s: float = 0.0  # client to core and back, all spent on the way in
    per_prompt_token_s: float = 0.0  # the same, per prompt token
    seed: int = 0
    retries: int = 0  # resends of a rejected request, each after the wait it names
    # Requests at once; for a workload without arrival times, users of a closed loop.
    concurrency: int | None = None

    def __post_init__(self) -> None:
        at_least = {
            "num_replicas": 1,
            "num_stages": 1,
            "max_in_flight": 1,
            "concurrency": 1,
            "start_up_s": 0.0,
            "request_s": 0.0,
        }
        for name, low in at_least.items():
            if getattr(self, name) is not None and getattr(self, name) < low:
                raise ConfigError(f"{name} = {getattr(self, name)!r} must be at least {low}")
        if self.num_stages > 1 and self.speculation is not None:
            raise ConfigError(
                f"num_stages = {self.num_stages}: drafts are not simulated over pipeline stages: leave one out"
            )
        check_faults(self.faults, self.num_replicas)


class Replica:
    """One engine. ``on_submit`` is called with the time at which each of its steps will be over."""

    def __init__(
        self,
        number: int,
        config: ClusterConfig,
        step_time: StepTime,
        clock: VirtualClock,
        on_submit: Callable[[float], None],
        *,
        reports: bool = False,
        watch: Callable[[Executor], Executor] | None = None,
    ) -> None:
        """``reports``: it keeps cache events for a router; ``watch`` wraps the executor."""
        self.number = number
        latency, scheduler, most_out = Latency(step_time, config.swap), config.scheduler, config.max_in_flight
        drafts = None
        if config.speculation is not None:  # a sequence is planned again once its drafts are verified
            scheduler, most_out = config.speculation.configured(scheduler), 1
            drafts = SimulatedDrafts(
                config.speculation, step_time, config.seed + number, max_rows=scheduler.max_num_batched_tokens
            )
        stages = config.num_stages
        most_out = stages if stages > 1 else most_out
        self.executor = sim_executor(
            latency, clock, on_submit, max_in_flight=most_out, drafts=drafts, num_stages=stages
        )
        has_target = config.tpot_s is not None
        events = EventBuffer() if reports else None
        made = Scheduler(
            scheduler, config.cache, events, step_time=step_time if has_target else None,
            chains_steps=self.executor.chains_steps, num_stages=stages, stage_rows=config.stage_rows,
        )  # fmt: skip
        controller = None
        if config.tpot_s is not None:
            controller = SloController(made.predictor, scheduler, config.tpot_s)
        self.core = EngineCore(made, watch(self.executor) if watch else self.executor, clock, controller)

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
        num_used = blocks - sum(s.num_free_blocks + s.num_idle_blocks for s in stats)
        self.points.append(
            Point(
                now,
                sum(s.num_running for s in stats),
                sum(s.num_waiting for s in stats),
                num_used / blocks,
                sum(s.num_generated_tokens for s in stats),
            )
        )
        if len(self.points) > _MOST_POINTS:
            del self.points[1::2]
            self._interval_s *= 2.0
        self.next_s = now + self._interval_s
