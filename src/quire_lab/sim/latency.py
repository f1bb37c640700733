"""`sim_executor`, and its seconds of a step: those of a profile or a roofline, plus proposing drafts and swapping."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from quire.clock import VirtualClock
from quire.cost.cost_model import StagedTime, StepTime
from quire.errors import StepError
from quire.executor.timed import Taken, TimedExecutor
from quire_lab.sim.drafts import SimulatedDrafts


@dataclass(frozen=True, slots=True)
class Swap:
    """Preemption by copying K and V to host memory and back, instead of recomputing them.

    The scheduler plans the tokens as for recomputation, within its budget; each costs a copy out and a copy in.
    """

    seconds_per_token: float  # one way


def sim_executor(
    latency: Latency,
    clock: VirtualClock,
    on_submit: Callable[[float], None],
    *,
    max_in_flight: int = 1,
    drafts: SimulatedDrafts | None = None,
    num_stages: int = 1,
) -> TimedExecutor:
    """Return an executor of modelled steps on a virtual clock; ``on_submit`` is told when each will be over."""

    def wait(left_s: float) -> None:
        raise StepError(f"the step will be over in {left_s} s, and its result is collected now")

    return TimedExecutor(
        latency.seconds, clock, wait=wait, on_submit=on_submit, max_in_flight=max_in_flight, restores=latency.swaps,
        add_drafts=None if drafts is None else drafts.add,
        stages=latency.of_stages if num_stages > 1 else None,
    )  # fmt: skip


class Latency:
    """Seconds of a step on one replica."""

    def __init__(self, step_time: StepTime, swap: Swap | None = None) -> None:
        self.swaps = swap is not None  # tokens of a preempted sequence are copied, not recomputed
        self._step_time, self._plain = step_time, step_time.seconds
        self._restore_s = 2.0 * swap.seconds_per_token if swap else 0.0

    def seconds(self, taken: Taken) -> float:
        """Return the time of a step."""
        return self._restore_s * taken.num_restored + self._plain(taken.step) + taken.result.draft_s

    def of_stages(self, taken: Taken) -> tuple[float, ...]:
        """Return the time of a step on each stage of a pipeline; blocks are copied before the first one."""
        first, *rest = cast(StagedTime, self._step_time).stage_seconds(taken.step)
        return (first + self._restore_s * taken.num_restored, *rest)
