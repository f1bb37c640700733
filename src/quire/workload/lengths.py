"""How long prompts and answers are, in tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Protocol

from quire.errors import ConfigError

_HOW = "write 512, uniform:LOW,HIGH or lognormal:MEDIAN,SIGMA[,MAX]"


class Lengths(Protocol):
    """A distribution of token counts, each at least 1."""

    def draw(self, num: int, rng: Random) -> list[int]:
        """Return ``num`` lengths."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same."""

    length: int

    def draw(self, num: int, rng: Random) -> list[int]:
        return [self.length] * num

    def __str__(self) -> str:
        return str(self.length)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Any of low…high, equally likely."""

    low: int
    high: int

    def draw(self, num: int, rng: Random) -> list[int]:
        return [rng.randint(self.low, self.high) for _ in range(num)]

    def __str__(self) -> str:
        return f"uniform:{self.low},{self.high}"


@dataclass(frozen=True, slots=True)
class LogNormal:
    """exp(normal): the shape of real prompts. Half are below ``median``; values above ``high`` become ``high``."""

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
        ConfigError: says ``name``, the value and what is allowed.
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
