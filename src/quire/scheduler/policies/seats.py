"""`Seats`: when seats come free, by the output that the running sequences are expected to give yet.

Times are at the pace that was measured. Computed once per step: a burst of requests that are rejected reads the same.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from quire.request import Request
from quire.scheduler.sequence import Sequence
from quire.scheduler.settings import long_threshold
from quire.scheduler.state import SchedulerState

ASSUMED_STEP_S = 0.05  # until a step was measured


class SeatTimes(NamedTuple):
    """Seconds from now, and the prompt tokens that running sequences have to compute."""

    free_s: list[float]  # when each seat is free, the earliest first
    typical_s: float  # for how long one is taken
    num_tokens: int  # short prompts
    num_long: int  # long prompts


class Seats:
    """The seats of one scheduler."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._stamp: tuple[int, ...] = ()
        self._times = SeatTimes([0.0], 0.0, 0, 0)

    def place_s(self, number: int) -> float:
        """Return the seconds until the ``number``-th sequence (from 1) of the queue finds a seat."""
        times = self.times()
        turns, index = divmod(max(1, number) - 1, len(times.free_s))
        return times.free_s[index] + turns * times.typical_s

    def times(self) -> SeatTimes:
        """Return when seats come free. Free ones are as many as max_num_seqs and the free blocks allow."""
        state, threshold = self._state, long_threshold(self._state.config)
        stamp = (state.next_step, len(state.running), len(state.in_flight), threshold)
        if stamp != self._stamp:
            self._stamp, self._times = stamp, self._predict(threshold)
        return self._times

    def _predict(self, threshold: int) -> SeatTimes:
        state, predictor, running = self._state, self._state.predictor, self._state.running
        step_s, mean = predictor.step_s or ASSUMED_STEP_S, predictor.mean_output
        sample = state.waiting.first(64) or running  # long outputs are more frequent among those that run
        typical = (
            sum(_num_left(seq, mean, from_start=True) for seq in sample) / len(sample) if sample else mean
        )
        free = state.config.max_num_seqs - len(running)
        if running:
            num_tokens = sum(seq.num_prompt for seq in running) / len(running) + typical
            need = math.ceil(num_tokens / state.cache.block_size) * state.cache.windows.num_groups
            free = min(free, state.cache.references.num_available // need)
        taken = sorted(
            _num_left(seq, mean) * step_s
            + max(0, seq.num_prompt - seq.num_planned) * predictor.prompt_token_s
            for seq in running
        )
        left = [max(0, seq.num_total - seq.num_planned - 1) for seq in running]
        num_long = sum(num for num in left if num > threshold > 0)
        free_s = [0.0] * max(0, free) + taken or [0.0]
        return SeatTimes(free_s, max(1.0, typical) * step_s, sum(left) - num_long, num_long)


def _num_left(seq: Sequence, mean: float, *, from_start: bool = False) -> float:
    """Return the output tokens that a sequence is expected to give yet, or in all. ``mean``: of others; 0: unknown."""
    done = 0 if from_start else len(seq.token_ids) - seq.num_prompt
    most = max(1, seq.max_total - seq.num_prompt - done)
    if not mean or not (seq.stop_ids or seq.sampling.stop):
        return most
    return max(1.0, min(most, max(mean - done, mean / 4)))


def least_output(request: Request) -> int:
    """Return the output tokens that a request has at the least: where nothing can end it early, max_tokens."""
    sampling = request.sampling
    may_stop = sampling.eos_token_ids or sampling.stop_token_ids or sampling.stop
    return max(1, sampling.min_tokens if may_stop else sampling.max_tokens or 1)
