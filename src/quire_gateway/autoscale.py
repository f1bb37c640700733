"""How many replicas a service needs: `PredictedLoad`, and `Utilisation` to compare it with. Pure: no clock, no I/O.

`PredictedLoad` plans for the load that will be there once a new replica is ready:

    rate      level and trend of the arrivals (Holt 1957), extrapolated by the cold start, plus the spread of arrivals
    mix       mean uncached prompt and output tokens of recent requests
    capacity  the highest rate at which the planner's formulas, from the engine's step times, hold the SLO in a replica
    need      rate / (capacity · headroom), plus what drains the requests beyond those that run within a cold start

`Utilisation` is the rule of Kubernetes' HorizontalPodAutoscaler over the share of time in which replicas compute.
Replicas are added at once, and taken away once the need has been lower for ``down_after_s``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

_WINDOW_S = 60.0  # over which rate and mix are averaged
_SPREADS = 1.0  # standard deviations of the arrivals within the window that are planned for
_TOLERANCE = 0.1  # of a replica, or of the ratio of utilisations, that changes nothing
_LEARNING = 0.3  # weight of one cold start


@dataclass(frozen=True, slots=True)
class Seen:
    """What has been counted up to a time, since the start; replicas are those of now."""

    time_s: float
    num_arrivals: int
    num_ended: int
    num_prompt_tokens: int  # of the ended requests, without those that were cached
    num_output_tokens: int
    busy_s: float  # that replicas have computed, all together
    num_ready: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What limits the number of replicas, and how fast it falls."""

    least: int = 1
    most: int
    down_after_s: float

    def within(self, replicas: int) -> int:
        return min(max(replicas, self.least), self.most)


@dataclass(frozen=True, slots=True)
class Decision:
    """The number of replicas that there should be."""

    replicas: int
    why: str


Policy = Callable[[Seen], Decision]


class _SlowDown:
    """Follows a rise at once, and a fall once all needs of the last ``down_after_s`` are lower."""

    def __init__(self, bounds: Bounds, tolerance: float) -> None:
        self._bounds = bounds
        self._tolerance = tolerance  # of a replica
        self._needs: deque[tuple[float, float]] = deque()

    def settle(self, now_s: float, need: float, current: int) -> int:
        """Return the number of replicas for a need that may be a fraction."""
        if not self._needs:
            self._needs.append((now_s, float(current)))
        while self._needs and self._needs[0][0] < now_s - self._bounds.down_after_s:
            self._needs.popleft()
        self._needs.append((now_s, need))
        if need > current + self._tolerance:
            return self._bounds.within(math.ceil(need - self._tolerance))
        lower = math.ceil(max(need for _, need in self._needs) + self._tolerance)
        return self._bounds.within(min(lower, current))


class ReplicaEstimate(Protocol):
    """What a planner predicts of one replica under requests of these lengths, in tokens."""

    def capacity(self, isl: int, osl: int) -> float:
        """Return the highest rate in requests per second that holds the SLO.

        Where none does, return the rate that a replica completes.
        """
        ...

    def concurrency(self, isl: int, osl: int, rate: float) -> float:
        """Return how many requests run at once at ``rate`` requests per second."""
        ...


class PredictedLoad:
    """A `Policy`. ``start_up_s`` is a first guess of a cold start."""

    def __init__(
        self, replica: ReplicaEstimate, bounds: Bounds, *, start_up_s: float, headroom: float = 0.8
    ) -> None:
        self._replica, self._bounds = replica, bounds
        self.start_up_s = start_up_s
        self._headroom = headroom
        self._slow_down = _SlowDown(bounds, _TOLERANCE)
        self._last: Seen | None = None
        self._level = self._trend = 0.0  # requests per second, and its change per second
        self._isl = self._osl = 0.0
        self._knees: dict[tuple[int, int], float] = {}
        self._num_wanted = 0
        self._since_s: float | None = None  # that more replicas are asked for than are ready

    def __call__(self, seen: Seen) -> Decision:
        before, self._last = self._last, seen
        if before is None:
            self._num_wanted = seen.num_ready
            return Decision(self._bounds.within(seen.num_ready), "first look")
        seconds = seen.time_s - before.time_s
        if seconds <= 0:
            return Decision(self._bounds.within(self._num_wanted), "no time has passed")
        self._learn_start_up(seen)
        self._learn_load(before, seen, seconds)
        if self._osl < 1:
            return Decision(
                self._bounds.within(max(self._num_wanted, seen.num_ready)), "no request has ended yet"
            )
        ahead = max(self._level, self._level + self._trend * (self.start_up_s + seconds))
        rate = ahead + _SPREADS * math.sqrt(self._level / _WINDOW_S)
        capacity = self.capacity(self._isl, self._osl)
        need = rate / capacity
        backlog = seen.num_arrivals - seen.num_ended - seen.num_ready * self._running(capacity)
        need += max(backlog, 0.0) / (capacity * max(self.start_up_s, seconds))
        current = self._num_wanted or seen.num_ready
        self._num_wanted = self._slow_down.settle(seen.time_s, need, current)
        why = (
            f"{rate:.2f} requests/s expected, {capacity:.2f} per replica at {self._isl:.0f} uncached prompt and "
            f"{self._osl:.0f} output tokens, {max(backlog, 0.0):.0f} waiting: {need:.2f} replicas"
        )
        return Decision(self._num_wanted, why)

    def capacity(self, isl: float, osl: float) -> float:
        """Return the requests per second that one replica is given, at mean lengths in tokens."""
        key = _rounded(isl), _rounded(osl)
        if key not in self._knees:
            self._knees[key] = self._replica.capacity(*key)
        return self._knees[key] * self._headroom

    def _running(self, capacity: float) -> float:
        """Return the requests that run in a replica at ``capacity``: none of them waits."""
        isl, osl = _rounded(self._isl), _rounded(self._osl)
        return self._replica.concurrency(isl, osl, capacity) + 1.0

    def _learn_load(self, before: Seen, seen: Seen, seconds: float) -> None:
        rate = (seen.num_arrivals - before.num_arrivals) / seconds
        weight = 1.0 - math.exp(-seconds / _WINDOW_S)
        level = (1 - weight) * (self._level + self._trend * seconds) + weight * rate
        slow = weight / 2
        self._trend = (1 - slow) * self._trend + slow * (level - self._level) / seconds
        self._level = max(level, 0.0)
        ended = seen.num_ended - before.num_ended
        if ended > 0:
            isl = (seen.num_prompt_tokens - before.num_prompt_tokens) / ended
            osl = (seen.num_output_tokens - before.num_output_tokens) / ended
            share = weight if self._osl else 1.0
            self._isl += share * (isl - self._isl)
            self._osl += share * (osl - self._osl)

    def _learn_start_up(self, seen: Seen) -> None:
        if self._num_wanted <= seen.num_ready:
            if self._since_s is not None:
                self.start_up_s += _LEARNING * (seen.time_s - self._since_s - self.start_up_s)
            self._since_s = None
        elif self._since_s is None:
            assert self._last is not None
            self._since_s = seen.time_s


class Utilisation:
    """A `Policy`: replicas · utilisation / target, unless that ratio is within a tenth of 1."""

    def __init__(self, target: float, bounds: Bounds) -> None:
        self._target = target
        self._slow_down = _SlowDown(bounds, 0.0)
        self._last: Seen | None = None
        self._num_wanted = 0

    def __call__(self, seen: Seen) -> Decision:
        before, self._last = self._last, seen
        if before is None or seen.time_s <= before.time_s or not seen.num_ready:
            self._num_wanted = self._num_wanted or seen.num_ready
            return Decision(self._num_wanted, "first look")
        busy = (seen.busy_s - before.busy_s) / ((seen.time_s - before.time_s) * seen.num_ready)
        ratio = busy / self._target
        need = float(self._num_wanted) if abs(ratio - 1.0) <= _TOLERANCE else seen.num_ready * ratio
        most = max(2 * self._num_wanted, self._num_wanted + 4)  # its default rise in one step
        self._num_wanted = self._slow_down.settle(seen.time_s, min(need, most), self._num_wanted)
        return Decision(self._num_wanted, f"{busy:.0%} busy, {self._target:.0%} wanted")


def _rounded(tokens: float) -> int:
    """Return a length rounded to steps of about 5 %, so that estimates can be kept."""
    return max(1, round(math.exp(round(math.log(max(tokens, 1.0)) * 20) / 20)))
