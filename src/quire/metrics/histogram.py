"""A histogram that is cheap enough for every chunk of every stream: one bisection and two additions per observation."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Histogram:
    """Counts of observations at or below each bound. Belongs to one event loop."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        assert list(bounds) == sorted(set(bounds))
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)  # the last one counts observations above all bounds
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value``, ``times`` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """(bound, observations ≤ bound) as Prometheus exposes them; the last bound is +Inf."""
        return cumulative(self.bounds, self.counts)


def cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """(bound, observations ≤ bound) of one more count than bounds."""
    names = [*(str(float(b)) for b in bounds), "+Inf"]
    return list(zip(names, map(float, accumulate(counts)), strict=True))
