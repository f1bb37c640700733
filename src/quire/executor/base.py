"""`Executor`: the seam between the core and whatever computes a step. No torch here."""

from __future__ import annotations

import logging
from typing import NamedTuple, Protocol

from quire.step import StepPlan, StepResult

_log = logging.getLogger(__name__)


class RankLoaded(NamedTuple):
    """The rank has loaded its part of the model."""

    rank: int
    pid: int
    kernels: str  # in words
    weight_bytes: int
    load_s: float
    host: str
    num_cores: int  # cores that it may use
    call_by_call: str = ""  # why its steps are not replayed; empty: they are


class Executor(Protocol):
    """Computes plans in the order in which they are submitted.

    Order of effect inside a step: ``gone`` → ``kv_moves``, ``state_moves`` → ``adapter_moves`` → ``new_seqs`` →
    ``transfers`` begin → forward over ``seqs``. K/V of every token of a step is stored before attention reads, within
    each layer: a sequence of the same step may read it. ``gone`` may name a sequence that the executor does not know;
    that is nothing to do. ``new_seqs`` may name one that it knows; the new state replaces the old one, block table
    included.

    A step that fails as a whole (an exception out of `collect`, or ``StepResult.error``) leaves the executor ready
    for the next one, and none of the transfers that it was to begin writes anything. Plans already queued behind it may
    then name sequences that it no longer knows: each of these gets a `SeqResult` with an error.

    A transfer that has begun ends with a `TransferDone` in the result of any later step, or in a message to the core.
    """

    # How many plans may be out: 1 on CPU, 2 on GPU, one per stage with pipeline parallelism.
    max_in_flight: int
    # Whether a sequence may be planned again while its last token is out, since token ids stay on the device.
    chains_steps: bool

    def submit(self, plan: StepPlan) -> None:
        """Queue a plan. Fewer than ``max_in_flight`` are out."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest plan out and return its result, with one `SeqResult` for each `SeqPlan`, in order."""
        ...

    def close(self) -> None:
        """Free what the executor holds. Nothing is submitted any more."""
        ...


def failed(plan: StepPlan, error: Exception) -> StepResult:
    """Return the result of a step that raised: the core fails its sequences with the text, and the engine goes on."""
    _log.error("step %d failed", plan.step, exc_info=error)
    return StepResult(plan.step, error=f"{type(error).__name__}: {error}")
