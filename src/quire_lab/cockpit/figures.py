"""How the page writes figures: three digits and a unit, a dash for what is not known."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

_SIZES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure of the live page."""

    name: str
    value: str
    alarm: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def count(value: float | None) -> str:
    """Return a count or a rate."""
    if value is None:
        return "–"
    if value >= 1e6:
        return f"{value / 1e6:.1f}M"
    if value >= 1e4:
        return f"{value / 1e3:.1f}k"
    if value >= 100 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def percent(part: float, total: float) -> str:
    """Return a share."""
    if total <= 0:
        return "–"
    share = 100 * part / total
    return f"{share:.1f} %" if 0 < share < 10 else f"{share:.0f} %"


def seconds(value: float | None) -> str:
    """Return a time in its unit."""
    if value is None:
        return "–"
    if value >= 10:
        return f"{value:.0f} s"
    if value >= 1:
        return f"{value:.1f} s"
    return f"{1e3 * value:.0f} ms" if value >= 0.01 else f"{1e3 * value:.1f} ms"


def size(num_bytes: float) -> str:
    """Return bytes in binary units."""
    for unit, name in _SIZES:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes:.0f} bytes"
