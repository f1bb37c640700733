"""Render the results file as Markdown: medians, ratios to the best peer, shares of the bound."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path

from facts import FACTS, Bounds, peak, shape_of
from results import Cell, Results, median, metrics, ranks_of

ENGINES = ("quire", "vllm", "llama.cpp", "openvino", "transformers")
PRECISIONS = ("bf16", "int8", "int4")
# metric → (workload, heading, whether more is better)
METRICS = {
    "prefill": ("A", "A prefill tok/s", True),
    "ttft": ("A", "A TTFT s", False),
    "decode": ("A", "A decode tok/s", True),
    "B": ("B", "B out tok/s", True),
    "C": ("C", "C s", False),
    "D": ("D", "D s", False),
}


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def probes(cell: Cell) -> tuple[float, dict[str, float]]:
    """Return (bytes a second, instruction → operations a second), the mean of before and after."""
    before, after = cell["before"], cell["after"]
    dots = {name: (before["dots"][name] + after["dots"][name]) / 2 for name in before["dots"]}
    return (before["read"] + after["read"]) / 2, dots


def share(cell: Cell, metric: str, models: Path) -> float | None:
    """Return the figure of a cell as a part of its bound."""
    shape, fact = shape_of(models / cell["model"]), FACTS[cell["engine"], cell["precision"]]
    read, dots = probes(cell)
    _, operations = peak(dots, cell["precision"], cell["isa"])
    weight_bytes = cell.get("weight_bytes") or shape.weight_bytes(fact)
    bound = Bounds(shape, fact, weight_bytes, read, operations).of(metric)
    if bound is None:
        return None
    value = metrics(cell)[metric]
    return value / bound if METRICS[metric][2] else bound / value


def entry(results: Results, cells: list[Cell], metric: str, models: Path) -> str:
    """Return "value (share of bound)" of an engine, "failed" or nothing; "~" where the machine was not ours alone."""
    value = median(cells, metric)
    if value is None:
        failed = any("failed" in cell for cell in cells)
        return "failed" if failed else ""
    parts = [share(cell, metric, models) for cell in cells if "failed" not in cell]
    shares = [part for part in parts if part is not None]
    mark = "" if all(results.steady(cell) for cell in cells) else "~"
    return mark + number(value) + (f" ({statistics.median(shares):.0%})" if shares else "")


def ratio(results: Results, metric: str, **where: str | int) -> str:
    """Return Quire's figure over the best peer's, above 1 where Quire is better; the peer is named.

    Ratios are of one round, whose visits follow each other, and their median is shown with the least and the most: the
    machine of one round is not that of another. Only where no peer has a round in common, by medians, marked ≈.
    """
    workload, _, more = METRICS[metric]

    def values(engine: str) -> dict[int, float]:
        cells = results.select(workload=workload, engine=engine, **where)
        return {cell["round"]: metrics(cell)[metric] for cell in cells if "failed" not in cell}

    ours = values("quire")
    found: dict[str, tuple[float, str]] = {}
    for engine in ENGINES[1:]:
        theirs = values(engine)
        both = [(ours[r], theirs[r]) for r in ours.keys() & theirs.keys()]
        if not both and ours and theirs:
            both = [(statistics.median(ours.values()), statistics.median(theirs.values()))]
        ratios = sorted(x / y if more else y / x for x, y in both)
        if ratios:
            sign = "" if ours.keys() & theirs.keys() else "≈"
            spread = f" ({ratios[0]:.2f} … {ratios[-1]:.2f})" if len(ratios) > 1 else ""
            found[engine] = (
                statistics.median(ratios),
                f"**{sign}{statistics.median(ratios):.2f}×** {engine}{spread}",
            )
    paired = {value for value in found.values() if "≈" not in value[1]}
    return min(paired or found.values())[1] if found else ""


def grid(results: Results, models: Path, model: str, isa: str, ranks: int) -> list[str]:
    lines = []
    for precision in PRECISIONS:
        where: dict[str, str | int] = {"model": model, "isa": isa, "precision": precision, "ranks": ranks}
        shown = [m for m, (w, _, _) in METRICS.items() if any(results.select(workload=w, **where))]
        engines = [e for e in ENGINES if any(results.select(engine=e, **where))]
        if not shown:
            continue
        lines += [f"\n| {precision} | GB/token | " + " | ".join(METRICS[m][1] for m in shown) + " | rounds |"]
        lines += ["|---" * (len(shown) + 3) + "|"]
        for engine in engines:
            cells = list(results.select(engine=engine, **where))
            fact = FACTS[engine, precision]
            weight = next((c["weight_bytes"] for c in cells if c.get("weight_bytes")), None)
            weight = weight or shape_of(models / model).weight_bytes(fact)
            row = [engine, f"{weight / 1e9:.2f}"]
            row += [
                entry(results, [c for c in cells if c["workload"] == METRICS[m][0]], m, models) for m in shown
            ]
            rounds = len({c["round"] for c in cells if "failed" not in c})
            lines.append("| " + " | ".join([*row, str(rounds)]) + " |")
        ratios = [ratio(results, m, **where) for m in shown]
        lines.append("| Quire / best peer | | " + " | ".join(ratios) + " | |")
    return lines


def spread(values: Iterable[float], unit: float) -> str:
    ordered = sorted(values)
    low, middle, high = ordered[0], statistics.median(ordered), ordered[-1]
    return f"{middle / unit:.4g} ({low / unit:.4g} … {high / unit:.4g})"


def ceilings(results: Results) -> list[str]:
    sides = [cell[side] for cell in results.cells.values() for side in ("before", "after")]
    lines = ["", "| ceiling, all threads | median (least … most) over all visits |", "|---|---|"]
    lines.append(f"| read, 2 GiB, one stream a thread, GB/s | {spread((s['read'] for s in sides), 1e9)} |")
    for name in sides[0]["dots"]:
        values = [s["dots"][name] for s in sides if name in s["dots"]]
        lines.append(f"| {name}, Gop/s | {spread(values, 1e9)} |")
    return lines


def what_is_quantized(used: set[tuple[str, str]]) -> list[str]:
    lines = ["", "| engine | precision | weights | output matrix | activations | KV |", "|---" * 6 + "|"]
    for engine, precision in FACTS:
        if (engine, precision) in used:
            f = FACTS[engine, precision]
            lines.append(f"| {engine} | {precision} | {f.weights} | {f.head} | {f.activations} | {f.kv} |")
    return lines


def failures(results: Results) -> list[str]:
    lines = []
    for cell in results.select():
        if "failed" in cell:
            what = " ".join(
                str(cell[k]) for k in ("model", "precision", "isa", "workload", "engine", "round")
            )
            lines.append(f"* {what}: {cell['failed']}")
    return ["", "## Failed", "", *lines] if lines else []


def render(results: Results, models: Path, head: str) -> str:
    """Return the whole page; ``head`` says machine, date, versions."""
    cells = list(results.cells.values())
    lines = [
        head,
        "",
        "Figures are medians over rounds; in brackets the share of the bound (bandwidth or dot units,",
        "whichever binds, from the probes before and after each visit). Ratios are medians over the rounds that both",
        "engines have (least … most), of one round each; above 1 Quire is faster.",
    ]
    for model in dict.fromkeys(cell["model"] for cell in cells):
        kinds = dict.fromkeys((cell["isa"], ranks_of(cell)) for cell in cells if cell["model"] == model)
        for isa, ranks in kinds:
            forced = "" if isa == "native" else f", forced {isa}"
            lines += ["", f"## {model}{forced}" + ("" if ranks == 1 else f", {ranks} tensor-parallel ranks")]
            lines += grid(results, models, model, isa, ranks)
    lines += ["", "## The machine's ceilings", *ceilings(results)]
    lines += ["", "## What is quantized"]
    lines += what_is_quantized({(cell["engine"], cell["precision"]) for cell in cells})
    lines += failures(results)
    return "\n".join(lines) + "\n"
