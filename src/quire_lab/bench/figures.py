"""Plots as SVG text, for reports that are one file and need neither a network nor a plotting package."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

MIN_TICKS = 3  # ticks of a logarithmic axis; with fewer, linear ticks
MAX_POINTS = 2000  # per line; more cannot be seen
WIDTH, HEIGHT = 960, 380  # pixels; a page scales them to its width
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 46, 40  # margins around the axes, pixels
COLOURS = ("#1f5fa8", "#c8501e", "#3a8f4d", "#8a4fa3", "#b8901a", "#4aa3a8", "#8c564b", "#666666")


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a plot."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    style: str = "line"  # line, points (a line with its points), steps or dashed
    spread: Sequence[tuple[float, float]] = ()  # least and most at each point, drawn as whiskers


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values from ``low`` to ``high`` to pixels from ``begin`` to ``end``."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    @classmethod
    def over(cls, values: Sequence[float], begin: float, end: float, *, log: bool, from_zero: bool) -> Axis:
        """Return the axis that shows all ``values``; a logarithmic one leaves out what is not positive."""
        shown = [v for v in values if math.isfinite(v) and (v > 0.0 or not log)]
        low, high = (min(shown), max(shown)) if shown else (1.0, 10.0)
        if log:
            return cls(low / 1.1, high * 1.1, begin, end, True)
        low = min(0.0, low) if from_zero else low
        return cls(low, high + (0.05 * (high - low) or 1.0), begin, end)

    def at(self, value: float) -> float:
        """Return the pixel of ``value``."""
        low, high = self.low, self.high
        if self.log:
            value, low, high = (math.log(max(v, 1e-300)) for v in (value, low, high))
        return self.begin + (self.end - self.begin) * (value - low) / (high - low)

    def ticks(self) -> list[float]:
        """Return round values between the ends, about five of them."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            digits = (1, 2, 5) if len(decades) <= 4 else (1,)
            values = [digit * 10.0**decade for decade in decades for digit in digits]
            shown = [v for v in values if self.low <= v <= self.high]
            if len(shown) >= MIN_TICKS:
                return shown
        rough = (self.high - self.low) / 5
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * digit for digit in (1, 2, 5, 10) if unit * digit >= rough)
        first = math.ceil(self.low / step)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def chart(
    series: Sequence[Series],
    *,
    title: str,
    x: str,
    y: str,
    log_x: bool = False,
    log_y: bool = False,
    marks: Sequence[tuple[float, str]] = (),
    limits: Sequence[tuple[float, str]] = (),
) -> str:
    """Lines over one pair of axes as an ``<svg>`` element.

    ``marks``: vertical lines (x, label). ``limits``: horizontal ones (y, label), which the axis always shows.
    """
    xs = [v for one in series for v in one.x]
    ys = [v for one in series for v in [*one.y, *(end for ends in one.spread for end in ends)]]
    ys += [value for value, _ in limits]
    across = Axis.over(xs, LEFT, WIDTH - RIGHT, log=log_x, from_zero=False)
    up = Axis.over(ys, HEIGHT - BOTTOM, TOP, log=log_y, from_zero=True)
    drawn = [piece for i, one in enumerate(series) for piece in _line(one, across, up, colour(i))]
    for place, label in marks:
        left = across.at(place)
        drawn.append(f'<path d="M{left:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#999" stroke-dasharray="2 3"/>')
        drawn.append(_text(left + 4, TOP + 10, label, 'font-size="10"'))
    for value, label in limits:
        height = up.at(value)
        drawn.append(
            f'<path d="M{LEFT} {height:.1f}H{WIDTH - RIGHT}" stroke="#b3261e" stroke-dasharray="8 4"/>'
        )
        drawn.append(_text(LEFT + 6, height - 4, label, 'font-size="10" style="fill:#b3261e"'))
    return frame(across, up, drawn, title=title, x=x, y=y, names=[one.name for one in series])


def colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def frame(
    across: Axis, up: Axis, drawn: Sequence[str], *, title: str, x: str, y: str, names: Sequence[str] = ()
) -> str:
    """Return the ``<svg>`` element: axes, grid, labels, legend (for ``names`` that are not empty) and ``drawn``."""
    right, bottom, middle = WIDTH - RIGHT, HEIGHT - BOTTOM, (TOP + HEIGHT - BOTTOM) / 2
    grid = [f"M{across.at(v):.1f} {TOP}V{bottom}" for v in across.ticks()]
    grid += [f"M{LEFT} {up.at(v):.1f}H{right}" for v in up.ticks()]
    centred, rightmost = 'text-anchor="middle"', 'text-anchor="end"'
    labels = [_text(across.at(v), bottom + 15, f"{v:.4g}", centred) for v in across.ticks()]
    labels += [_text(LEFT - 5, up.at(v) + 4, f"{v:.4g}", rightmost) for v in up.ticks()]
    labels.append(_text((LEFT + right) / 2, HEIGHT - 6, x, centred))
    labels.append(_text(14, middle, y, f'{centred} transform="rotate(-90 14 {middle:.0f})"'))
    labels.append(_text((LEFT + right) / 2, 16, title, f'{centred} font-size="13"'))
    place = float(LEFT)
    for i, name in enumerate(names):
        if name:
            labels.append(_text(place, 34, f"— {name}", f'style="fill:{colour(i)}"'))
            place += 24 + 6.2 * len(name)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" xmlns="http://www.w3.org/2000/svg" '
        'font-family="system-ui,sans-serif" font-size="11" fill="#222">'
        f'<path d="{"".join(grid)}" stroke="#e6e6e6"/><path d="M{LEFT} {TOP}V{bottom}H{right}" '
        f'stroke="#222" fill="none"/>{"".join(drawn)}{"".join(labels)}</svg>'
    )


def _line(one: Series, across: Axis, up: Axis, stroke: str) -> Iterator[str]:
    """Yield the elements of one line, thinned out to `MAX_POINTS`."""
    values = [p for p in zip(one.x, one.y, strict=True) if math.isfinite(p[1]) and (p[1] > 0.0 or not up.log)]
    stride = max(1, len(values) // MAX_POINTS)
    shown = values[::stride] + (values[-1:] if stride > 1 else [])
    points = [(across.at(x), up.at(y)) for x, y in shown]
    path = "".join(f"{'L' if i else 'M'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(points))
    if one.style == "steps":
        path = "".join(f"H{x:.1f}V{y:.1f}" if i else f"M{x:.1f} {y:.1f}" for i, (x, y) in enumerate(points))
    dashes = ' stroke-dasharray="6 4"' if one.style == "dashed" else ""
    if path:
        yield f'<path d="{path}" fill="none" stroke="{stroke}" stroke-width="1.5"{dashes}/>'
    for x, ends in zip(one.x, one.spread, strict=False):
        if all(math.isfinite(end) and (end > 0.0 or not up.log) for end in ends):
            low, high = map(up.at, ends)
            whisker = f"M{across.at(x):.1f} {low:.1f}V{high:.1f}m-4 0h8M{across.at(x) - 4:.1f} {low:.1f}h8"
            yield f'<path d="{whisker}" fill="none" stroke="{stroke}"/>'
    if one.style == "points":
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{stroke}"/>' for x, y in points)


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{escape(text)}</text>'
