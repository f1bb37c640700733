"""A `Picture` in the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from quire_lab.bench.page import show
from quire_lab.learn.picture import Bars, Cell, Facts, Grid, Lines, Part, Picture, Table, Timeline

WIDTH, HEIGHT = 72, 14  # characters of a plot
COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red", "bright_cyan", "bright_yellow")
STATES = {"wait": "bright_black", "idle": "bright_black", "prefill": "yellow", "decode": "cyan", "draft": "magenta",
          "cached": "green", "transfer": "red", "link": "red"}  # fmt: skip
# Without colours prompts, decodes and waiting are still told apart.
MARKS = {"wait": "░", "idle": "░", "prefill": "▒", "both": "▓", "draft": "▚"}
OWNERS = {"": "bright_black", "waste": "red", "shared": "white"}
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bits of a braille character: [row][column]


def draw(out: Console, picture: Picture) -> None:
    """Print the parts from top to bottom."""
    out.print(f"[bold]{picture.title}[/bold]")
    for part in picture.parts:
        out.print()
        if part.title:
            out.print(part.title, style="italic", highlight=False)
        for line in _drawn(part):
            out.print(line, highlight=False, soft_wrap=not isinstance(line, RichTable))


def _drawn(part: Part) -> Iterable[Text | RichTable]:
    match part:
        case Lines():
            return _lines(part)
        case Bars():
            return _bars(part)
        case Timeline():
            return _timeline(part)
        case Grid():
            return _grid(part)
        case Table():
            return [_table(part)]
        case Facts():
            return [Text(f"  {f.text}: {show(f.value)} {f.unit}".rstrip()) for f in part.facts]


class _Scale:
    """Maps the values of an axis to 0 … ``size`` − 1."""

    def __init__(self, values: Iterable[float], size: int, *, log: bool, from_zero: bool) -> None:
        shown = [v for v in values if math.isfinite(v) and (v > 0.0 or not log)] or [0.0 if not log else 1.0]
        self.low, self.high, self._log, self._size = min(shown), max(shown), log, size
        if from_zero and not log:
            self.low = min(0.0, self.low)
        if self.low == self.high:
            self.high = self.low + (abs(self.low) or 1.0)

    def at(self, value: float) -> int | None:
        if not math.isfinite(value) or (self._log and value <= 0.0):
            return None
        low, high = self.low, self.high
        if self._log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return round((value - low) / (high - low) * (self._size - 1))


def _lines(part: Lines) -> list[Text]:
    across = _Scale(part.x.ends or (0.0, 1.0), 2 * WIDTH, log=part.x.log, from_zero=False)
    up = _Scale((v for one in part.lines for v in one.y), 4 * HEIGHT, log=part.y.log, from_zero=True)
    dots: dict[tuple[int, int], tuple[int, str]] = {}
    for number, one in enumerate(part.lines):
        places = [(across.at(x), up.at(y)) for x, y in zip(one.x, one.y, strict=True)]
        known = [(x, y) for x, y in places if x is not None and y is not None]
        for x, y in _between(known):
            place = (HEIGHT - 1 - y // 4, x // 2)
            bits, _ = dots.get(place, (0, ""))
            dots[place] = (bits | DOTS[3 - y % 4][x % 2], COLOURS[number % len(COLOURS)])
    rows = []
    for row in range(HEIGHT):
        label = show(float(up.high)) if row == 0 else show(float(up.low)) if row == HEIGHT - 1 else ""
        line = Text(f"{label:>9} │")
        for column in range(WIDTH):
            bits, colour = dots.get((row, column), (0, ""))
            line.append(chr(0x2800 + bits) if bits else " ", style=colour)
        rows.append(line)
    ends = f"{show(float(across.low)):<{WIDTH // 2}}{show(float(across.high)):>{WIDTH // 2}}"
    rows += [Text(" " * 10 + "└" + "─" * WIDTH), Text(" " * 11 + ends)]
    legend = Text(f"{'':11}{part.x} → {part.y}   ")
    for number, one in enumerate(part.lines):
        legend.append(f" ■ {one.name}" if one.name else "", style=COLOURS[number % len(COLOURS)])
    rows.append(legend)
    rows += [Text(f"{'':11}{label} at {show(float(x))}") for x, label in part.marks]
    if part.zone is not None:
        low, high, label = part.zone
        rows.append(Text(f"{'':11}{label}: {show(float(low))} … {show(float(high))}", style="green"))
    return rows


def _between(points: Sequence[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    """Yield the dots on the way from each point to the next."""
    yield from points[:1]
    for (x0, y0), (x1, y1) in pairwise(points):
        steps = max(abs(x1 - x0), abs(y1 - y0), 1)
        for i in range(1, steps + 1):
            yield round(x0 + (x1 - x0) * i / steps), round(y0 + (y1 - y0) * i / steps)


def _bars(part: Bars) -> list[Text]:
    sums = [sum(column) for column in zip(*part.bars.values(), strict=True)]
    most = max(sums if part.stacked else [v for values in part.bars.values() for v in values]) or 1.0
    wide = max(map(len, part.names))
    lines = []
    for place, name in enumerate(part.names):
        line = Text(f"{name:>{wide}} │")
        for number, (series, values) in enumerate(part.bars.items()):
            if not part.stacked and number:
                line = Text(f"{'':>{wide}} │")
            line.append(
                "█" * round(values[place] / most * (WIDTH - 12)), style=COLOURS[number % len(COLOURS)]
            )
            if not part.stacked:
                line.append(f" {show(float(values[place]))} {part.y.unit} {series}".rstrip())
                lines.append(line)
        if part.stacked:
            line.append(f" {show(float(sums[place]))} {part.y.unit}")
            lines.append(line)
    if part.stacked:
        legend = Text(f"{'':>{wide}}  {part.y} ")
        for number, series in enumerate(part.bars):
            legend.append(f" ■ {series}", style=COLOURS[number % len(COLOURS)])
        lines.append(legend)
    return lines


def _timeline(part: Timeline) -> list[Text]:
    spans = [span for row in part.rows for span in row.spans]
    low, high = part.x.ends or (0.0, 1.0)
    wide = max((len(row.name) for row in part.rows), default=0)
    states = dict.fromkeys(span.state for span in spans)
    colours = {state: _state_colour(state, number) for number, state in enumerate(states)}
    lines = []
    for row in part.rows:
        cells = [(" ", "")] * WIDTH
        for span in row.spans:
            begin = int((span.start - low) / (high - low or 1.0) * WIDTH)
            end = max(begin + 1, round((span.end - low) / (high - low or 1.0) * WIDTH))
            mark = MARKS.get(span.state, "█")
            cells[begin:end] = [(mark, colours[span.state])] * len(cells[begin:end])
        line = Text(f"{row.name:>{wide}} │")
        for mark, colour in cells:
            line.append(mark, style=colour)
        lines.append(line)
    ends = f"{show(float(low)):<{WIDTH // 2}}{show(float(high)):>{WIDTH // 2}}"
    legend = Text(f"{'':>{wide}}  {part.x}  ")
    for state in states:
        legend.append(f" {MARKS.get(state, '█')} {state}", style=colours[state])
    return [*lines, Text(" " * (wide + 2) + ends), legend]


def _state_colour(state: str, number: int) -> str:
    return STATES.get(state) or COLOURS[number % len(COLOURS)]


def _grid(part: Grid) -> list[Text]:
    owners = dict.fromkeys(cell.owner for row in part.rows for cell in row if cell.owner not in OWNERS)
    colours = OWNERS | {owner: COLOURS[n % len(COLOURS)] for n, owner in enumerate(owners)}
    names = part.names or ("",) * len(part.rows)
    wide = max((len(name) for name in names), default=0)
    cell_wide = max((len(cell.text) for row in part.rows for cell in row), default=0) or 1
    lines = []
    for name, row in zip(names, part.rows, strict=True):
        line = Text(f"{name:>{wide}} ")
        for cell in row:
            line.append(
                f"{_mark(cell):^{cell_wide}}", style=f"{colours[cell.owner]} reverse" if cell.owner else "dim"
            )
            line.append(" ")
        lines.append(line)
    return lines


def _mark(cell: Cell) -> str:
    return cell.text or ("·" if not cell.owner else " ")


def _table(part: Table) -> RichTable:
    table = RichTable(part.header[0], box=None, pad_edge=False)
    for heading in part.header[1:]:
        table.add_column(heading, justify="right")
    for name, *values in part.rows:
        table.add_row(str(name), *map(show, values))
    return table
