"""Summaries as tables in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from quire.bench.page import show, summary_rows


def console() -> Console:
    """The terminal, or 120 columns where the output goes into a file."""
    return Console(width=None if sys.stdout.isatty() else 120)


def print_table(out: Console, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Names on the left, numbers on the right."""
    table = Table(header[0], box=None, pad_edge=False)
    for heading in header[1:]:
        table.add_column(heading, justify="right")
    for name, *values in rows:
        table.add_row(str(name), *map(show, values))
    out.print(table)


def print_summary(out: Console, summary: Mapping[str, Any]) -> None:
    """Latencies, rates, and what failed or was refused by kind."""
    print_table(out, ("", "mean", "p50", "p90", "p95", "p99"), summary_rows(summary))
    say = {key: show(summary[key]) for key in summary if key.endswith("_per_s") or key.startswith("num_")}
    lines = [
        f"{say['num_completed']} of {say['num_requests']} requests completed in {summary['duration_s']:.1f} s, "
        f"{say['num_cancelled']} cancelled, {say['num_failed']} failed; {say['num_refused_rows']} rows refused",
        f"{say['requests_per_s']} requests/s, goodput {say['goodput_per_s']}/s; tokens/s: "
        f"{say['input_tokens_per_s']} in, {say['output_tokens_per_s']} out",
        *(f"failed: {count} × {kind}" for kind, count in summary["errors"].items()),
        *(f"refused: {count} × {reason}" for reason, count in summary["refused_rows"].items()),
    ]
    out.print("\n".join(lines), highlight=False)
