"""`Picture`: what a simulation shows, as plain data that a terminal and a web page draw alike.

lines      curves over two axes, with marked places and a zone      timeline   rows of spans over one axis
bars       values by category, side by side or stacked              grid       cells by kind, with a text each
table      a header and rows                                        facts      sentences, each with its figure
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal


@dataclass(frozen=True, slots=True)
class Axis:
    """``unit`` is empty for counts. ``ends``: where it begins and ends; None: with the data."""

    title: str
    unit: str = ""
    log: bool = False
    ends: tuple[float, float] | None = None

    def __str__(self) -> str:
        return f"{self.title}, {self.unit}" if self.unit else self.title


@dataclass(frozen=True, slots=True)
class Line:
    """One curve; ``x`` ascends."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    style: Literal["line", "points", "steps", "dashed"] = "line"


@dataclass(frozen=True, slots=True)
class Lines:
    """Curves over common axes. ``marks``: places on x with a label; ``zone``: from x to x, with a label."""

    kind: ClassVar[str] = "lines"
    title: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...]
    marks: tuple[tuple[float, str], ...] = ()
    zone: tuple[float, float, str] | None = None


@dataclass(frozen=True, slots=True)
class Bars:
    """``bars``: series → a value for each of ``names``."""

    kind: ClassVar[str] = "bars"
    title: str
    y: Axis
    names: tuple[str, ...]
    bars: Mapping[str, tuple[float, ...]]
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a row of a time line. ``state`` decides its colour: "prefill", "decode", "wait", "idle" …"""

    start: float
    end: float
    state: str
    label: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a time line."""

    name: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Rows from top to bottom over one axis."""

    kind: ClassVar[str] = "timeline"
    title: str
    x: Axis
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a grid. Cells of one ``owner`` have one colour; "" is empty, "waste" and "shared" have their own."""

    owner: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Grid:
    """Cells in rows, which may differ in length."""

    kind: ClassVar[str] = "grid"
    title: str
    rows: tuple[tuple[Cell, ...], ...]
    names: tuple[str, ...] = ()  # names of the rows; empty: none


@dataclass(frozen=True, slots=True)
class Table:
    """The first column names the rows."""

    kind: ClassVar[str] = "table"
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, slots=True)
class Fact:
    """A sentence whose figure is ``value``, in ``unit``."""

    text: str
    value: float | str
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the picture says in figures."""

    kind: ClassVar[str] = "facts"
    title: str
    facts: tuple[Fact, ...]


Part = Lines | Bars | Timeline | Grid | Table | Facts


@dataclass(frozen=True, slots=True)
class Picture:
    """What a simulation shows for one choice of its controls. Charts over the same x axis have the same ends of it."""

    title: str
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        values: dict[Axis, list[float]] = {}
        for part in self.parts:
            if isinstance(part, Lines | Timeline):
                values.setdefault(part.x, []).extend(_along(part))
        ends = {axis: (min(xs), max(xs)) for axis, xs in values.items() if xs}
        aligned = (
            replace(part, x=replace(part.x, ends=ends[part.x]))
            if isinstance(part, Lines | Timeline) and part.x in ends
            else part
            for part in self.parts
        )
        object.__setattr__(self, "parts", tuple(aligned))

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON: each part has its ``kind``; what is not finite is null."""
        return {
            "title": self.title,
            "parts": [{"kind": part.kind} | _finite(asdict(part)) for part in self.parts],
        }

    def fact(self, text: str) -> float | str:
        """Return the value of the fact whose sentence begins with ``text``."""
        facts = [
            f.value for p in self.parts if isinstance(p, Facts) for f in p.facts if f.text.startswith(text)
        ]
        assert len(facts) == 1, (text, facts)
        return facts[0]


def _along(part: Lines | Timeline) -> list[float]:
    """Return what a chart shows along its x axis; the time of a timeline begins at 0."""
    if isinstance(part, Timeline):
        return [0.0, *(edge for row in part.rows for span in row.spans for edge in (span.start, span.end))]
    return [x for line in part.lines for x in line.x if math.isfinite(x) and (x > 0.0 or not part.x.log)]


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
