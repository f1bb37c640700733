"""When which step is captured: pure counting and seconds, no device. See `runner.graphs` for what is captured.

A capture costs about as much host time as launching its step a few times, and whoever comes meanwhile waits for it. So
a size is captured one at a time, the most frequent first, and only

    while idle      no step is in flight and none is planned, and the size came twice
    or when repaid  its steps have cost as many seconds of launching as the capture will, and it takes at most 0.1 s
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

MOST_DELAY_S = 0.1  # of a step
TIMES_A_LAUNCH = 3.0  # seconds of a capture over those of a launch, before one was measured
LEAST_USES = 2

Size = TypeVar("Size", bound=Hashable)


@dataclass(slots=True)
class _Uses:
    count: int = 0
    spent_s: float = 0.0
    shortest_s: float = float("inf")


class CapturePolicy(Generic[Size]):
    """Sizes that are not captured yet, and what they have cost."""

    def __init__(self) -> None:
        self._uses: dict[Size, _Uses] = {}
        self._ratio = TIMES_A_LAUNCH

    def launched(self, size: Size, took_s: float) -> None:
        """A step of ``size`` was launched kernel by kernel in ``took_s`` of the host's time."""
        uses = self._uses.setdefault(size, _Uses())
        uses.count += 1
        uses.spent_s += took_s
        uses.shortest_s = min(uses.shortest_s, took_s)

    def captured(self, size: Size, took_s: float) -> None:
        """``size`` is captured; how long it took is what the next ones are expected to take."""
        uses = self._uses.pop(size)
        if uses.shortest_s > 0.0:
            self._ratio = max(1.0, took_s / uses.shortest_s)

    def next(self, *, idle: bool) -> Size | None:
        """Return the size to capture now, if any."""
        for size, uses in sorted(self._uses.items(), key=lambda each: -each[1].count):
            if uses.count < LEAST_USES:
                return None
            expected_s = self._ratio * uses.shortest_s
            if idle or (uses.spent_s >= expected_s and expected_s <= MOST_DELAY_S):
                return size
        return None

    def forget(self) -> None:
        """Start to count anew: what was captured is gone."""
        self._uses.clear()
