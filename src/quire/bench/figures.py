"""Plots as SVG text, for reports that are one file and need no network. Drawn by matplotlib (extra ``bench``)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import ConfigError

MAX_POINTS = 2000  # of one line; more cannot be seen
_COLOURS = ("#1f5fa8", "#c8501e", "#3a8f4d", "#8a4fa3", "#b8901a", "#4aa3a8", "#8c564b", "#666666")


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a plot."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    style: str = "line"  # line, points (a line with its points), steps or dashed


def need_plots() -> None:
    """Fail now, not after a run of an hour, where plots cannot be drawn.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    _figure(1.0, 1.0)


def chart(
    series: Sequence[Series],
    *,
    title: str,
    x: str,
    y: str,
    log_x: bool = False,
    log_y: bool = False,
    marks: Sequence[tuple[float, str]] = (),
    size: tuple[float, float] = (6.4, 3.6),
) -> str:
    """Lines over one pair of axes as an ``<svg>`` element. ``marks``: vertical lines (x, what they say)."""
    figure = _figure(*size)
    axes = figure.add_subplot()
    for i, one in enumerate(series):
        _draw(axes, one, _COLOURS[i % len(_COLOURS)])
    for place, text in marks:
        axes.axvline(place, color="#999999", linewidth=0.9, linestyle=":")
        axes.annotate(
            text, (place, 0.98), xycoords=("data", "axes fraction"), fontsize=7, va="top", rotation=90
        )
    axes.set(title=title, xlabel=x, ylabel=y)
    if log_x:
        axes.set_xscale("log")
    if log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0.0)
    if any(one.name for one in series):
        axes.legend(fontsize=7, frameon=False)
    return _svg(figure)


def bars(
    rows: Sequence[Sequence[tuple[float, float]]], *, title: str, x: str, y: str, size: tuple[float, float]
) -> str:
    """Intervals (start, length) on numbered rows, as an ``<svg>`` element: who had a slot and when."""
    figure = _figure(*size)
    axes = figure.add_subplot()
    for row, spans in enumerate(rows):
        axes.broken_barh(
            list(spans), (row + 0.08, 0.84), facecolors=_COLOURS[: len(_COLOURS) - 1], linewidth=0
        )
    axes.set(title=title, xlabel=x, ylabel=y, ylim=(0, max(1, len(rows))))
    return _svg(figure)


def _draw(axes: Any, one: Series, colour: str) -> None:
    stride = max(1, len(one.x) // MAX_POINTS)
    xs, ys = list(one.x[::stride]), list(one.y[::stride])
    if stride > 1:
        xs.append(one.x[-1])
        ys.append(one.y[-1])
    options: dict[str, Any] = {"color": colour, "label": one.name or None, "linewidth": 1.4}
    if one.style == "steps":
        axes.step(xs, ys, where="post", **options)
    elif one.style == "points":
        axes.plot(xs, ys, marker="o", markersize=3.5, **options)
    elif one.style == "dashed":
        axes.plot(xs, ys, linestyle="--", **options)
    else:
        axes.plot(xs, ys, **options)


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib import rcParams
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a report with plots needs matplotlib: pip install 'quire[bench]'") from error
    rcParams["svg.fonttype"] = "none"  # text stays text: smaller, and it can be searched
    rcParams["svg.hashsalt"] = "quire"  # the same report gives the same bytes
    return Figure(figsize=(width, height), layout="constrained")


def _svg(figure: Any) -> str:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, color="#e6e6e6", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=8)
        axes.title.set_fontsize(10)
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
