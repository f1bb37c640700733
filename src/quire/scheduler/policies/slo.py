"""`SloController`: holds TPOT by what a step may cost. A pure function of the steps that were computed.

Every sequence that decodes waits for the whole step, so its TPOT is the mean of the steps it lives through. After each
step the controller asks the predictor,

    running limit   how many sequences can decode in X at all
    chunk budget    how many prompt tokens fit in X beside the decodes of the next step

and sends both as a `PolicyChange`. Without decodes no sequence waits: the whole budget is free. Each step is held, not
the mean of steps: letting long steps use what short ones left gained no goodput on any of three traces, and a request
with a short output paid for it (benchmarks/slo_controller.py, 2026-11-21).
Tokens do not depend on any of this; only when they come does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from quire.config import SchedulerConfig
from quire.scheduler.policies.forecast import ModelledPredictor
from quire.scheduler.predictor import Predictor
from quire.scheduler.settings import CONTROLLED, PolicyChange
from quire.step import MIN_RETRY_TOKENS

MARGIN = 0.92  # share of the limit; p95 is above the mean
REFRESH = 4  # steps with the same number of decodes between two looks
MIN_CHUNK = MIN_RETRY_TOKENS  # a prompt always goes on
WORTHWHILE = 1 / 16  # a smaller change of a setting is not sent
VALUES = dict(zip(CONTROLLED, ("_limit", "_budget"), strict=True))  # where those in force are


class SloController:
    """Call `applied` after every step that did not fail; send on what it returns."""

    def __init__(self, predictor: Predictor, config: SchedulerConfig, tpot_s: float) -> None:
        """``predictor``: with a model of step times."""
        assert tpot_s > 0
        assert isinstance(predictor, ModelledPredictor)
        self._predictor = predictor
        self._aim_s = tpot_s * MARGIN
        self._most = config  # set by a person: never exceeded
        self._budget = config.max_num_batched_tokens
        self._limit = config.max_num_seqs
        self.pinned: set[str] = set()  # settings that a person changed: theirs until released
        self._asked, self._age = -1, 0  # decodes that the settings are for; steps

    def applied(self) -> PolicyChange | None:
        """Return new settings after a step, where they differ enough to matter."""
        num_seqs, num_decodes = self._predictor.num_seqs, self._predictor.num_decodes
        if not num_seqs:
            return None
        # Sequences of this step decode in the next one, except those that are still in their prompts.
        coming = num_decodes + (num_seqs > num_decodes)
        self._age += 1
        if coming == self._asked and self._age < REFRESH:
            return None
        self._asked, self._age = coming, 0
        return self._change(coming)

    def pin(self, change: PolicyChange, release: tuple[str, ...] = ()) -> None:
        """A person changed settings: those of this controller that are named are theirs, until they release them."""
        for name, setting in VALUES.items():
            value = getattr(change, name)
            if value is not None:
                self.pinned.add(name)
                setattr(self, setting, value)  # in force: the next wish is compared with it
            elif name in release:
                self.pinned.discard(name)
        self._asked = -1

    def unpinned(self, change: PolicyChange) -> PolicyChange:
        """Return ``change`` without what is pinned."""
        return replace(change, **dict.fromkeys(self.pinned)) if self.pinned else change

    def _change(self, num_decodes: int) -> PolicyChange | None:
        limit = self._running_limit()
        budget = self._most.max_num_batched_tokens
        if num_decodes:
            budget = min(budget, num_decodes + self.chunk(num_decodes))
        new_limit = limit if "max_num_seqs" not in self.pinned and _differs(limit, self._limit) else None
        is_free = "max_num_batched_tokens" not in self.pinned
        new_budget = budget if is_free and _differs(budget, self._budget) else None
        if new_limit is None and new_budget is None:
            return None
        self._limit, self._budget = new_limit or self._limit, new_budget or self._budget
        return PolicyChange(max_num_seqs=new_limit, max_num_batched_tokens=new_budget)

    def _running_limit(self) -> int:
        """The most sequences that decode within the aim; at least one runs."""
        return _most(lambda num: self._predictor.decode_s(num) <= self._aim_s, 1, self._most.max_num_seqs)

    def chunk(self, num_decodes: int) -> int:
        """The most prompt tokens beside ``num_decodes`` decodes within the aim."""
        most = self._most.max_num_batched_tokens
        return _most(
            lambda num: self._predictor.mixed_s(num_decodes, num) <= self._aim_s,
            MIN_CHUNK,
            most,
            MIN_CHUNK // 2,
        )


def _most(holds: Callable[[int], bool], low: int, high: int, error: int = 1) -> int:
    """Return the largest number in low…high that ``holds``, or one less than ``error`` below it; ``low`` holds."""
    if holds(high):
        return high
    while high - low > error:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _differs(new: int, old: int) -> bool:
    return abs(new - old) > old * WORTHWHILE or (new != old and new < 32)
