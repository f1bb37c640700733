"""One line of ``quire plan --explain``, and how its figures are written."""

from __future__ import annotations

from dataclasses import dataclass

from quire.units import GIB


@dataclass(frozen=True, slots=True)
class Line:
    """``name`` = ``value``, by ``formula``."""

    name: str
    value: str
    formula: str


def gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if abs(size) >= GIB / 10 else f"{size / 2**20:.1f} MiB"


def ms(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds * 1e3:.3g} ms"
    return "without bound" if seconds == float("inf") else f"{seconds:.1f} s"
