"""`--sweep`: raise the load until goodput falls, and find the knee."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

GROWTH = 2.0  # of the load from one run to the next, on the way up
FALLEN = 0.8  # of the best goodput: the load is past the knee
KNEE = 0.95  # of the best goodput
MAX_RUNS_UP = 14
Run = Callable[[float], Mapping[str, Any]]  # offered requests/s → summary with ``goodput_per_s``


def sweep(run: Run, start_rate: float, refinements: int = 3) -> list[Mapping[str, Any]]:
    """Run loads from ``start_rate`` up until goodput falls or no longer follows, then between the runs about the knee.

    Returns the summaries in the order of the runs, each with ``offered_per_s``.
    """
    points: dict[float, Mapping[str, Any]] = {}
    rate = start_rate
    for _ in range(MAX_RUNS_UP):
        points[rate] = run(rate)
        if _is_past(list(points.values())):
            break
        rate *= GROWTH
    for _ in range(refinements):
        between = _next_between(sorted(points), knee(list(points.values()))["offered_per_s"])
        if between is None:
            break
        points[between] = run(between)
    return list(points.values())


def knee(points: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The smallest load whose goodput is at least 95 % of the best one."""
    best = max(p["goodput_per_s"] for p in points)
    good = [p for p in points if p["goodput_per_s"] >= KNEE * best]
    return min(good, key=lambda p: float(p["offered_per_s"]))


def _is_past(points: Sequence[Mapping[str, Any]]) -> bool:
    """Goodput fell well below the best, or nothing was good at all, or three loads in a row brought no more."""
    goodputs = [float(p["goodput_per_s"]) for p in points]
    best = max(goodputs)
    if goodputs[-1] < FALLEN * best:
        return True
    if best == 0.0:
        return len(points) >= 2
    return len(goodputs) >= 3 and max(goodputs[-2:]) <= 1.02 * goodputs[-3]


def _next_between(rates: Sequence[float], knee_rate: float) -> float | None:
    """The middle (geometric) of the wider gap beside the knee; None where both are below 5 %."""
    place = rates.index(knee_rate)
    gaps = [(rates[i + 1] / rates[i], rates[i]) for i in (place - 1, place) if 0 <= i < len(rates) - 1]
    wide = max(gaps, default=(1.0, knee_rate))
    return None if wide[0] < 1.05 else wide[1] * math.sqrt(wide[0])
