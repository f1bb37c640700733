"""When sequences may enter.

    continuous   always
    static       when nothing runs: a batch of those who wait, and nobody joins it
    dynamic      as static, but the batch starts only when it is full or its oldest has waited long enough

A batch is a number of seats. A sequence that left its seat without ending (preempted, or a sibling that found no
room at its fork) gets it back.
"""

from __future__ import annotations

from quire.config import SchedulerConfig


class Gate:
    """Counts the seats that the batch being formed still has."""

    def __init__(self) -> None:
        self._num_seats = 0

    def seats(
        self, config: SchedulerConfig, now: float, num_running: int, num_waiting: int, oldest_s: float
    ) -> int:
        """Return how many may enter now. ``oldest_s``: arrival of the oldest that waits."""
        if config.gate == "continuous":
            return num_waiting
        if num_waiting == 0:
            self._num_seats = 0  # what is left of a batch whose members went away
        elif self._num_seats == 0 and num_running == 0:
            full = num_waiting >= config.max_num_seqs
            if config.gate == "static" or full or now >= oldest_s + config.dynamic_max_wait_s:
                self._num_seats = min(num_waiting, config.max_num_seqs)
        return min(self._num_seats, num_waiting)

    def enter(self) -> None:
        """A sequence took a seat."""
        self._num_seats = max(0, self._num_seats - 1)

    def return_seat(self) -> None:
        """A sequence of the batch has to enter again."""
        self._num_seats += 1

    def opens_at(self, config: SchedulerConfig, num_running: int, oldest_s: float) -> float | None:
        """Return when time alone will open the gate (dynamic), or None."""
        if config.gate == "dynamic" and self._num_seats == 0 and num_running == 0:
            return oldest_s + config.dynamic_max_wait_s
        return None
