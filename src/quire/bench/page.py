"""Results for people: an HTML report in one file (no script, no network, light and dark), and terminal tables."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment
from rich.console import Console
from rich.table import Table

from quire.errors import ConfigError

# Of the table of latencies that `summary_rows` returns.
SUMMARY_HEADER = ("", "mean", "p50", "p90", "p95", "p99")


class Section(NamedTuple):
    """A part of a report, in this order; what is empty is left out."""

    heading: str = ""
    text: str = ""
    tables: Sequence[tuple[Sequence[str], Sequence[Sequence[Any]]]] = ()  # header and rows of each
    plots: Sequence[str] = ()  # ``<svg>`` elements


def html_page(title: str, sections: Sequence[Section]) -> str:
    """Return the HTML file of a report, from the template ``page.html``."""
    environment = Environment(autoescape=True, trim_blocks=True, keep_trailing_newline=True)
    environment.filters["show"] = show
    template = environment.from_string((files("quire.bench") / "page.html").read_text())
    return template.render(title=title, sections=sections)


def show(value: Any) -> str:
    """Return a number with its significant digits, anything else as it is."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def summary_rows(summary: Mapping[str, Any]) -> list[list[Any]]:
    """Return the latencies of a summary as rows: name, mean and percentiles in milliseconds."""
    names = {"TTFT": "ttft_ms", "TPOT": "tpot_ms", "ITL": "itl_ms", "E2EL": "e2el_ms"}
    return [[f"{name} ms", *summary[key].values()] for name, key in names.items()]


def write(path: str | Path, text: str) -> None:
    """Write a report file.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from error


def finite(value: Any) -> Any:
    """Return the value with infinities and NaN, which JSON lacks, as null."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def console() -> Console:
    """Return the terminal, or a console of 120 columns where the output goes to a file."""
    return Console(width=None if sys.stdout.isatty() else 120)


def print_table(out: Console, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print names on the left and numbers on the right."""
    table = Table(header[0], box=None, pad_edge=False)
    for heading in header[1:]:
        table.add_column(heading, justify="right")
    for name, *values in rows:
        table.add_row(str(name), *map(show, values))
    out.print(table)


def print_summary(out: Console, summary: Mapping[str, Any]) -> None:
    """Print latencies, rates, and counts of failures and of refused rows by kind."""
    print_table(out, SUMMARY_HEADER, summary_rows(summary))
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
