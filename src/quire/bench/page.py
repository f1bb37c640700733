"""Results for people: an HTML report in one file (no script, no network, light and dark), and terminal tables."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from quire.errors import ConfigError

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1080px;margin:2rem auto;padding:0 1rem}"
    "body{color:#222;background:#fff}"
    "h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}"
    "table{border-collapse:collapse;margin:.6rem 0}td,th{padding:.2rem .8rem;border-bottom:1px solid #ddd}"
    "td{text-align:right;font-variant-numeric:tabular-nums}td:first-child,th{text-align:left}"
    ".plots{display:flex;flex-wrap:wrap;gap:1rem}.plots svg{width:100%;max-width:520px;height:auto;background:#fff}"
    "@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}td,th{border-color:#444}}"
)


class Page:
    """Collects headings, tables and plots; `html` returns the file."""

    def __init__(self, title: str, note: str = "") -> None:
        self._title = title
        self._parts = [f"<h1>{escape(title)}</h1>", f"<p>{escape(note)}</p>" if note else ""]

    def heading(self, text: str) -> None:
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def paragraph(self, text: str) -> None:
        self._parts.append(f"<p>{escape(text)}</p>")

    def table(self, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
        body = "".join("<tr>" + "".join(f"<td>{escape(show(c))}</td>" for c in row) + "</tr>" for row in rows)
        self._parts.append(f"<table><tr>{head}</tr>{body}</table>")

    def plots(self, svgs: Sequence[str]) -> None:
        self._parts.append(
            '<div class="plots">' + "".join(f"<figure>{svg}</figure>" for svg in svgs) + "</div>"
        )

    def html(self) -> str:
        body = "\n".join(part for part in self._parts if part)
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(self._title)}</title>'
            f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
        )


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
