"""`TtftModel`: the time to first token of each replica as a line over prompt tokens, learned from what was observed."""

from __future__ import annotations

from dataclasses import dataclass

_DECAY = 0.98  # per observation of a replica: the last 50 count
_COMMON_DECAY = 0.998  # per observation of any
_PRIOR_S_PER_TOKEN = 1e-4
_PRIOR = (0.0, _PRIOR_S_PER_TOKEN)
_PRIOR_WEIGHT = 0.5
# A replica's own pace counts if it is this many times the common one, or its inverse, over some observations. What is
# learned of one replica alone scatters by more than that while it is busy, and would take prefixes away from it.
_BAND = 2.0
MIN_OBSERVED = 10.0


@dataclass(slots=True)
class _Sums:
    """Decayed sums of a least-squares line. ``y``: seconds; ``common``: what the common line predicts for them."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    common: float = 0.0

    def add(self, x: float, y: float, common: float, decay: float) -> None:
        self.weight = self.weight * decay + 1.0
        self.x = self.x * decay + x
        self.y = self.y * decay + y
        self.xx = self.xx * decay + x * x
        self.xy = self.xy * decay + x * y
        self.common = self.common * decay + common

    def line(self) -> tuple[float, float]:
        """Return (seconds, seconds per token)."""
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        variance = self.xx / self.weight - mean_x * mean_x
        covariance = self.xy / self.weight - mean_x * mean_y
        # The prior counts as observations with the spread of the mean: equal prompts say nothing of a slope.
        spread = _PRIOR_WEIGHT * (1.0 + mean_x * mean_x) / (self.weight + _PRIOR_WEIGHT)
        slope = max((covariance + spread * _PRIOR_S_PER_TOKEN) / (variance + spread), 0.0)
        slope = min(slope, mean_y / mean_x) if mean_x > 0 else slope
        return max(mean_y - slope * mean_x, 0.0), slope


class TtftModel:
    """Predicts ``base + per_token · tokens`` seconds, where tokens are those queued ahead and the request's own."""

    def __init__(self) -> None:
        self._sums: dict[int, _Sums] = {}
        self._lines: dict[int, tuple[float, float]] = {}  # (seconds, seconds per token)
        self._common = _Sums()  # of all replicas
        self._common_line = _PRIOR
        self._factors: dict[int, float] = {}  # of replicas whose pace is not the common one

    def observe(self, replica: int, num_tokens: int, ttft_s: float) -> None:
        """A request had ``num_tokens`` uncached prompt tokens to wait for and took ``ttft_s``."""
        x, sums = float(num_tokens), self._sums.setdefault(replica, _Sums())
        base, slope = self._common_line
        sums.add(x, ttft_s, base + slope * x, _DECAY)
        self._lines[replica] = sums.line()
        self._common.add(x, ttft_s, 0.0, _COMMON_DECAY)
        self._common_line = self._common.line()
        factor = sums.y / sums.common if sums.common > 0 and sums.weight >= MIN_OBSERVED else 1.0
        if 1 / _BAND <= factor <= _BAND:
            self._factors.pop(replica, None)
        else:
            self._factors[replica] = factor

    def predict(self, replica: int, num_tokens: int) -> float:
        """Return seconds to the first token."""
        base, slope = self._lines.get(replica, _PRIOR)
        return base + slope * num_tokens

    def pace_s(self, replica: int) -> float:
        """Return the seconds per token by which replicas are compared: the common ones, unless one differs much."""
        return max(self._common_line[1], 1e-9) * self._factors.get(replica, 1.0)

    def per_token_s(self, replica: int) -> float:
        return self._lines.get(replica, _PRIOR)[1]

    def num_observed(self, replica: int) -> float:
        """Return how many recent observations the line of a replica rests on."""
        sums = self._sums.get(replica)
        return sums.weight if sums is not None else 0.0

    def forget(self, replica: int) -> None:
        """Another replica has this number from now on."""
        self._sums.pop(replica, None)
        self._lines.pop(replica, None)
        self._factors.pop(replica, None)
