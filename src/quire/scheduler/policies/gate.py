"""Gates that form batches: when sequences may enter. Without this policy they enter at any step ("continuous").

    static       when nothing runs: a batch of those that wait, and nothing joins it
    dynamic      as static, but the batch starts only when it is full or its oldest has waited long enough

A batch is a number of seats. A sequence that left its seat without ending (preempted, or a sibling that found no
room at its fork) gets it back.
"""

from __future__ import annotations

from quire.config import SchedulerConfig
from quire.scheduler.policy import Policy
from quire.scheduler.sequence import Sequence
from quire.scheduler.state import SchedulerState
from quire.scheduler.waiting import StepRoom


class Rule(Policy):
    """Counts the seats that the batch being formed still has."""

    def __init__(self, state: SchedulerState) -> None:
        self._state, self._gate = state, state.config.gate
        self._num_seats = 0

    def budget(self, room: StepRoom) -> None:
        room.seats = lambda: self._seats(room.now)

    def on_start(self, seq: Sequence, forked: bool) -> None:
        if not forked:
            self._num_seats = max(0, self._num_seats - 1)

    def on_return(self, seq: Sequence) -> None:
        self._num_seats += 1

    def wakes_at(self) -> float | None:
        state, config = self._state, self._state.config
        if config.gate == "dynamic" and state.waiting and self._num_seats == 0 and not state.running:
            return state.waiting.oldest_arrival_s() + config.dynamic_max_wait_s
        return None

    def configure(self, config: SchedulerConfig) -> None:
        if config.gate != self._gate:
            self._gate, self._num_seats = config.gate, 0  # the batch that was being formed is dropped

    def _seats(self, now: float) -> int:
        """Return how many may enter now."""
        config, waiting = self._state.config, self._state.waiting
        num_waiting = len(waiting)
        if num_waiting == 0:
            self._num_seats = 0  # the members of a batch went away
        elif self._num_seats == 0 and not self._state.running:
            is_full = num_waiting >= config.max_num_seqs
            if (
                config.gate == "static"
                or is_full
                or now >= waiting.oldest_arrival_s() + config.dynamic_max_wait_s
            ):
                self._num_seats = min(num_waiting, config.max_num_seqs)
        return min(self._num_seats, num_waiting)
