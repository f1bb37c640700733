"""The engine's own scheduler and cache under a given list of requests, step by step, on a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from quire.config import CacheConfig, SchedulerConfig
from quire.cost.cost_model import StepTime
from quire.cost.efficiency import efficiency_of
from quire.cost.hardware import find_hardware
from quire.cost.roofline import Roofline, decoder_work
from quire.cost.split import Split
from quire.executor.base import Executor
from quire.executor.timed import TimedExecutor
from quire.models.checkpoint import spec_of
from quire.step import StepPlan, StepResult
from quire_lab.sim.drafts import Speculation
from quire_lab.sim.replica import ClusterConfig
from quire_lab.sim.run import Simulated, simulate
from quire_lab.workload.request import Workload, WorkloadRequest

MODELS = ("llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b",
          "mixtral-8x7b", "deepseek-v3")  # fmt: skip
DEVICES = ("a100", "h100", "h200", "b200", "mi300x", "l4", "rtx-4090")


@cache
def roofline(
    model: str, device: str, precision: str = "bf16", tp: int = 1, *, ideal: bool = False
) -> Roofline:
    """Return the step times of ``model`` on ``tp`` devices."""
    spec, hardware = spec_of(model), find_hardware(device)
    efficiency = efficiency_of("ideal" if ideal else "default", hardware, spec, precision)
    return Roofline(decoder_work(spec, precision, "bf16", Split(tp=tp)), hardware, efficiency)


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence in one step."""

    request: int  # index in the workload
    start: int  # tokens computed before
    count: int  # tokens computed in this step
    samples: bool  # whether a token is sampled


@dataclass(frozen=True, slots=True)
class Step:
    """One step that the scheduler planned."""

    start_s: float
    end_s: float
    rows: tuple[Row, ...]

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)


class StepWatch:
    """An executor that keeps every plan that it passes on. A request's seed is its index (`quire_lab.sim.requests`)."""

    def __init__(self, inner: Executor) -> None:
        assert isinstance(inner, TimedExecutor)
        self._inner = inner
        self.max_in_flight, self.chains_steps = inner.max_in_flight, inner.chains_steps
        self.steps: list[Step] = []
        self._seqs: dict[
            int, tuple[int, int]
        ] = {}  # seq_id → index of its request, tokens known at admission

    def submit(self, plan: StepPlan) -> None:
        """Keep the plan with its times."""
        for new in plan.new_seqs:
            num_known = len(new.prompt_token_ids) + len(new.output_token_ids)
            self._seqs[new.seq_id] = new.sampling.seed or 0, num_known
        before_s = self._inner.busy_s
        self._inner.submit(plan)
        rows = []
        for seq in plan.seqs:
            index, num_known = self._seqs[seq.seq_id]
            start, count = seq.num_computed_tokens, seq.num_scheduled_tokens
            rows.append(Row(index, start, count, start + count >= num_known))
        end_s = self._inner.free_s
        self.steps.append(Step(end_s - (self._inner.busy_s - before_s), end_s, tuple(rows)))

    def collect(self) -> StepResult:
        """Return the result of the oldest plan out."""
        return self._inner.collect()

    def close(self) -> None:
        """Close the inner executor."""
        self._inner.close()


@dataclass(frozen=True, slots=True)
class Watched:
    """The result of a simulation, and its steps by replica."""

    result: Simulated
    steps: tuple[tuple[Step, ...], ...]


def requests_of(
    prompts: Sequence[int], outputs: Sequence[int], arrivals_s: Sequence[float] = (0.0,)
) -> Workload:
    """Return one request per output length; shorter lists are gone through again."""
    requests = [
        WorkloadRequest(arrivals_s[i % len(arrivals_s)], prompts[i % len(prompts)], length, i)
        for i, length in enumerate(outputs)
    ]
    return Workload(tuple(requests), {}, "given lengths")


def watch(
    workload: Workload,
    step_time: StepTime,
    scheduler: SchedulerConfig,
    *,
    num_blocks: int = 100_000,
    block_size: int = 16,
    prefix_cache: bool = True,
    speculation: Speculation | None = None,
    num_replicas: int = 1,
    request_s: float = 0.0,
) -> Watched:
    """Run ``workload`` through the engine's scheduler and cache; one step is in flight at a time."""
    cache_config = CacheConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        enable_prefix_caching=prefix_cache,
        model_key="simulated",
    )
    config = ClusterConfig(
        scheduler, cache_config, num_replicas=num_replicas, speculation=speculation, request_s=request_s
    )
    watches: list[StepWatch] = []

    def wrap(executor: Executor) -> Executor:
        watches.append(StepWatch(executor))
        return watches[-1]

    result = simulate(config, step_time, workload, watch=wrap)
    return Watched(result, tuple(tuple(one.steps) for one in watches))
