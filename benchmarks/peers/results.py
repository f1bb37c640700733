"""The results file: one JSON object a line, one line a cell; a later line of the same cell replaces an earlier one."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Cell = dict[str, Any]
SIDES = ("before", "after")
KEY = ("model", "precision", "isa", "workload", "engine", "round")


def ranks_of(cell: Cell) -> int:
    """Return over how many tensor-parallel ranks a cell ran; older files do not say, which is 1."""
    return int(cell.get("ranks", 1))


def key(cell: Cell) -> tuple[Any, ...]:
    return (*(cell[name] for name in KEY), ranks_of(cell))


def _of_rounds(cell: Cell) -> tuple[Any, ...]:
    return key(cell | {"round": -1})


class Results:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.cells: dict[tuple[Any, ...], Cell] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                cell = json.loads(line)
                self.cells[key(cell)] = cell

    def add(self, cells: Iterable[Cell]) -> None:
        with self.path.open("a") as file:
            for cell in cells:
                self.cells[key(cell)] = cell
                file.write(json.dumps(cell) + "\n")

    def select(self, **wanted: Any) -> Iterator[Cell]:
        """Yield the cells whose fields equal ``wanted``."""
        for cell in self.cells.values():
            known = cell | {"ranks": ranks_of(cell)}
            if all(known.get(name) == value for name, value in wanted.items()):
                yield cell

    def outdated(self, since: int) -> list[Cell]:
        """Return Quire's cells of rounds before ``since`` where it has later ones: figures of older code."""
        newest: dict[tuple[Any, ...], int] = {}
        for cell in self.select(engine="quire"):
            newest[_of_rounds(cell)] = max(cell["round"], newest.get(_of_rounds(cell), 0))
        return [c for c in self.select(engine="quire") if c["round"] < since <= newest[_of_rounds(c)]]

    def steady(self, cell: Cell) -> bool:
        """Whether the machine was ours alone: a probe beside another load gives half of what it gave at best.

        Read bandwidth is left out: it has states of its own on a shared host.
        """
        best: dict[str, float] = {}
        for probe in (c[side]["dots"] for c in self.cells.values() for side in SIDES):
            best = {name: max(rate, best.get(name, 0.0)) for name, rate in probe.items()}
        shares = [rate / best[name] for side in SIDES for name, rate in cell[side]["dots"].items()]
        return statistics.median(shares) > 0.7


def metrics(cell: Cell) -> dict[str, float]:
    """Return the figures of a cell: tokens a second for prefill, decode and B; seconds for ttft, C and D."""
    if "failed" in cell:
        return {}
    total = statistics.median(cell["total_s"])
    if cell["workload"] == "A":
        first = statistics.median(cell["prefill_s"])
        return {"prefill": 512 / first, "ttft": first, "decode": 127 / (total - first)}
    if cell["workload"] == "B":
        return {"B": cell["output_tokens"] / total}
    return {cell["workload"]: total}


def median(cells: Iterable[Cell], metric: str) -> float | None:
    """Return the median over rounds, or None where no round has the metric."""
    values = [m[metric] for m in map(metrics, cells) if metric in m]
    return statistics.median(values) if values else None
