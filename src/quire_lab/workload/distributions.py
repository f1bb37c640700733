"""When requests arrive and how long prompts and answers are. Arrival times are fixed before a run: an open loop."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Protocol

from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How requests arrive where no trace says it.

    ``rate`` requests a second on average; infinite: all at once. Gaps are gamma distributed with shape ``burstiness``
    (1: a Poisson process; below 1 burstier; infinite: equal gaps). With ``ramp_to`` the rate of a Poisson process goes
    linearly from ``rate`` to ``ramp_to`` over the run.
    """

    rate: float = math.inf
    burstiness: float = 1.0
    ramp_to: float | None = None

    def __post_init__(self) -> None:
        if not self.rate > 0.0:
            raise ConfigError(f"rate = {self.rate!r} must be above 0 requests per second (inf: all at once)")
        if not self.burstiness > 0.0:
            raise ConfigError(
                f"burstiness = {self.burstiness!r} must be above 0 (1: Poisson, inf: equal gaps)"
            )
        if self.ramp_to is None:
            return
        if not 0.0 < self.ramp_to < math.inf or math.isinf(self.rate):
            raise ConfigError(f"a ramp from {self.rate!r} to {self.ramp_to!r} needs two finite rates above 0")
        if self.burstiness != 1.0:
            raise ConfigError(f"a ramp is a Poisson process: burstiness = {self.burstiness!r} must be 1")

    def times(self, num: int, seed: int) -> list[float]:
        """Return ``num`` ascending arrival times in seconds, the same for the same seed."""
        rng = Random(f"arrivals {seed}")
        if math.isinf(self.rate):
            return [0.0] * num
        if self.ramp_to is not None:
            return ramp(num, self.rate, self.ramp_to, rng)
        if math.isinf(self.burstiness):
            return [i / self.rate for i in range(num)]
        if self.burstiness == 1.0:
            return list(accumulate(rng.expovariate(self.rate) for _ in range(num)))
        scale_s = 1.0 / (self.rate * self.burstiness)
        return list(accumulate(rng.gammavariate(self.burstiness, scale_s) for _ in range(num)))

    def __str__(self) -> str:
        if math.isinf(self.rate):
            return "all at once"
        if self.ramp_to is not None:
            return f"ramp {self.rate:g} to {self.ramp_to:g}/s"
        kinds = {1.0: "Poisson", math.inf: "constant"}
        return f"{kinds.get(self.burstiness, f'gamma({self.burstiness:g})')} {self.rate:g}/s"


def ramp(num: int, rate: float, ramp_to: float, rng: Random) -> list[float]:
    """Return a Poisson process whose rate goes linearly to ``ramp_to`` over 2 num/(rate + ramp_to) seconds.

    By inversion: the k-th point is the time at which the integral of the rate reaches that of a process of rate 1.
    """
    length_s = 2.0 * num / (rate + ramp_to)
    slope = (ramp_to - rate) / length_s
    times = []
    for point in accumulate(rng.expovariate(1.0) for _ in range(num)):
        if point >= num:
            times.append(length_s + (point - num) / ramp_to)
        else:
            # rate t + slope t²/2 = point, in the form without cancellation for a small slope.
            times.append(2.0 * point / (rate + math.sqrt(rate * rate + 2.0 * slope * point)))
    return times


def replay(times_s: Sequence[float], time_scale: float = 1.0) -> list[float]:
    """Return a trace's own times, counted from the first and multiplied by ``time_scale``: 2 halves the load."""
    if not 0.0 <= time_scale < math.inf:
        raise ConfigError(f"time_scale = {time_scale!r} must be 0 (all at once) or more; 2 is half the load")
    start_s = min(times_s, default=0.0)
    return [(t - start_s) * time_scale for t in times_s]


def mean_rate(times_s: Iterable[float]) -> float:
    """Return the requests/s of arrival times: gaps over their span; infinite where the span is 0."""
    times = sorted(times_s)
    span_s = times[-1] - times[0] if times else 0.0
    return (len(times) - 1) / span_s if span_s > 0.0 else math.inf


_HOW = "write 512, uniform:LOW,HIGH or lognormal:MEDIAN,SIGMA[,MAX]"


class Lengths(Protocol):
    """A distribution of token counts, each at least 1."""

    def draw(self, num: int, rng: Random) -> list[int]:
        """Return ``num`` lengths."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always ``length``."""

    length: int

    def draw(self, num: int, rng: Random) -> list[int]:
        return [self.length] * num

    def __str__(self) -> str:
        return str(self.length)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Each of low…high with equal probability."""

    low: int
    high: int

    def draw(self, num: int, rng: Random) -> list[int]:
        return [rng.randint(self.low, self.high) for _ in range(num)]

    def __str__(self) -> str:
        return f"uniform:{self.low},{self.high}"


@dataclass(frozen=True, slots=True)
class LogNormal:
    """exp(normal), the shape of real prompt lengths, with that ``median``; values above ``high`` become ``high``."""

    median: float
    sigma: float
    high: int | None = None

    def draw(self, num: int, rng: Random) -> list[int]:
        mu, high = math.log(self.median), math.inf if self.high is None else self.high
        return [int(min(high, max(1, round(rng.lognormvariate(mu, self.sigma))))) for _ in range(num)]

    def __str__(self) -> str:
        return f"lognormal:{self.median:g},{self.sigma:g}" + ("" if self.high is None else f",{self.high}")


def parse_lengths(text: str, name: str) -> Lengths:
    """Read ``512``, ``uniform:128,512`` or ``lognormal:512,0.8[,4096]``.

    Raises:
        ConfigError: names ``name``, the value and what is allowed.
    """
    kind, _, rest = text.strip().rpartition(":")
    try:
        numbers = [float(part) for part in rest.split(",")]
        made = _make(kind, numbers)
    except ValueError:
        made = None
    if made is None:
        raise ConfigError(f"{name} = {text!r} is not a distribution of lengths of 1 token or more: {_HOW}")
    return made


def parse_workload(text: str) -> tuple[Lengths, Lengths] | None:
    """Read ``--workload``: lengths of prompts and outputs with a slash between them; None: ``text`` is a file, a trace.

    Raises:
        ConfigError: it is neither.
    """
    if Path(text).is_file():
        return None
    prompt, slash, output = text.partition("/")
    try:
        if slash:
            return parse_lengths(prompt, "prompt"), parse_lengths(output, "output")
    except ConfigError as error:
        raise ConfigError(f"--workload {text!r}: {error}") from None
    raise ConfigError(
        f"--workload {text!r} must be PROMPT/OUTPUT in tokens, such as 1024/256, or the file of a trace"
    )


def _make(kind: str, numbers: list[float]) -> Lengths | None:
    match kind, numbers:
        case "" | "fixed", [length] if length == int(length) >= 1:
            return Fixed(int(length))
        case "uniform", [low, high] if 1 <= low <= high and low == int(low) and high == int(high):
            return Uniform(int(low), int(high))
        case "lognormal", [median, sigma] if median >= 1 and 0 <= sigma <= 10:
            return LogNormal(median, sigma)
        case "lognormal", [median, sigma, high] if (
            median >= 1 and 0 <= sigma <= 10 and high == int(high) >= 1
        ):
            return LogNormal(median, sigma, int(high))
    return None
