"""`TtftModel`: the time to first token of each replica as a line over prompt tokens, learned from what was observed."""

from __future__ import annotations

from dataclasses import dataclass

_DECAY = 0.98  # per observation: the last 50 count
_PRIOR_S_PER_TOKEN = 1e-4
_PRIOR_WEIGHT = 0.5
_PRIOR = (0.0, _PRIOR_S_PER_TOKEN)


@dataclass(slots=True)
class _Sums:
    """Decayed sums of a least-squares line."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        for name, value in (("weight", 1.0), ("x", x), ("y", y), ("xx", x * x), ("xy", x * y)):
            setattr(self, name, getattr(self, name) * _DECAY + value)


class TtftModel:
    """Predicts ``base + per_token · tokens`` seconds, where tokens are those queued ahead and the request's own."""

    def __init__(self) -> None:
        self._sums: dict[int, _Sums] = {}
        self._lines: dict[int, tuple[float, float]] = {}  # (seconds, seconds per token)

    def observe(self, replica: int, num_tokens: int, ttft_s: float) -> None:
        """A request had ``num_tokens`` uncached prompt tokens to wait for and took ``ttft_s``."""
        sums = self._sums.setdefault(replica, _Sums())
        sums.add(float(num_tokens), ttft_s)
        mean_x, mean_y = sums.x / sums.weight, sums.y / sums.weight
        variance = sums.xx / sums.weight - mean_x * mean_x
        covariance = sums.xy / sums.weight - mean_x * mean_y
        # The prior counts as observations with the spread of the mean: equal prompts say nothing of a slope.
        spread = _PRIOR_WEIGHT * (1.0 + mean_x * mean_x) / (sums.weight + _PRIOR_WEIGHT)
        slope = max((covariance + spread * _PRIOR_S_PER_TOKEN) / (variance + spread), 0.0)
        slope = min(slope, mean_y / mean_x) if mean_x > 0 else slope
        self._lines[replica] = (max(mean_y - slope * mean_x, 0.0), slope)

    def predict(self, replica: int, num_tokens: int) -> float:
        """Return seconds to the first token."""
        base, slope = self._lines.get(replica, _PRIOR)
        return base + slope * num_tokens

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
