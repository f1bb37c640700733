"""Results for people: an HTML report in one file (no script, no network, light and dark), and terminal tables."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from functools import reduce
from importlib.resources import files
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment
from rich.console import Console
from rich.table import Table

from quire.errors import ConfigError
from quire.slo import Slo
from quire_lab.bench.figures import Series, chart
from quire_lab.bench.summary import ERROR, OK, RequestRecord

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
    template = environment.from_string((files("quire_lab.bench") / "page.html").read_text())
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


TableRows = tuple[Sequence[str], list[list[Any]]]


def run_report(
    title: str,
    facts: Mapping[str, Any],
    summary: Mapping[str, Any],
    records: Sequence[RequestRecord],
    more: Sequence[str] = (),
) -> str:
    """Return the page of one run: facts, summary, CDFs, requests over time; ``more``: further plots at the end."""
    sections = [
        Section(tables=[_facts(facts)]),
        Section("Summary", tables=_summary(summary)),
        Section("Latency", plots=cdfs(records)),
        Section("Over time", plots=[*timelines(records), *more]),
    ]
    return html_page(title, sections)


def sweep_report(
    title: str,
    facts: Mapping[str, Any],
    points: Sequence[Mapping[str, Any]],
    knee: Mapping[str, Any],
    records: Sequence[RequestRecord],
    slo: Slo | None = None,
) -> str:
    """Return the page of a sweep: goodput and latency by load with the limits of ``slo``, and the run at the knee.

    ``points``: summaries with ``offered_per_s``.
    """
    rate = knee["offered_per_s"]
    text = f"Knee: {rate:.4g} requests/s, the last load that goodput ({knee['goodput_per_s']:.4g}/s) follows."
    header = ("offered/s", "goodput/s", "requests/s", "output tokens/s", "TTFT p50 ms", "TTFT p95 ms", "TPOT p50 ms",
              "TPOT p95 ms", "failed")  # fmt: skip
    sections = [
        Section(tables=[_facts(facts)]),
        Section("Load", text, plots=sweep_charts(points, rate, slo)),
        Section(tables=[(header, [_point(p) for p in points])]),
        Section("The run at the knee"),
        Section("Summary", tables=_summary(knee), plots=[*cdfs(records), *timelines(records)]),
    ]
    return html_page(title, sections)


def sweep_charts(points: Sequence[Mapping[str, Any]], knee: float, slo: Slo | None = None) -> list[str]:
    """Return the plots of goodput, latency and tokens by offered load, with the limits of ``slo``.

    Points with several ``runs`` have whiskers from the least to the most of them.
    """
    ordered = sorted(points, key=lambda p: p["offered_per_s"])
    load = [p["offered_per_s"] for p in ordered]
    marks = [(knee, "knee")]
    goodput = [
        _by_load("goodput", ordered, "goodput_per_s"),
        _by_load("completed", ordered, "requests_per_s"),
        Series("offered", load, load, "dashed"),
    ]
    charts = [chart(goodput, title="Goodput", x="offered requests/s", y="requests/s", marks=marks)]
    targets = slo or Slo()
    for key, name, limit_s in (
        ("ttft_ms", "TTFT", targets.ttft_s),
        ("tpot_ms", "TPOT", targets.tpot_s),
        ("e2el_ms", "E2EL", targets.e2el_s),
    ):
        limits = [] if limit_s is None else [(limit_s * 1e3, f"SLO {limit_s * 1e3:.4g} ms")]
        lines = [_by_load(part, ordered, key, part) for part in ("p50", "p95", "p99")]
        charts.append(
            chart(lines, title=name, x="offered requests/s", y="ms", marks=marks, log_y=True, limits=limits)
        )
    tokens = [_by_load("", ordered, "output_tokens_per_s")]
    charts.append(chart(tokens, title="Output", x="offered requests/s", y="tokens/s", marks=marks))
    return charts


def _by_load(name: str, points: Sequence[Mapping[str, Any]], *path: str) -> Series:
    """Return the line of the value at ``path`` over the load, where it is known, with its spread between runs."""

    def value(summary: Mapping[str, Any]) -> Any:
        return reduce(getitem, path, summary)

    known = [p for p in points if value(p) is not None]
    runs = [[v for v in map(value, p.get("runs", ())) if v is not None] or [value(p)] for p in known]
    spread = [(min(values), max(values)) for values in runs] if any("runs" in p for p in known) else ()
    return Series(name, [p["offered_per_s"] for p in known], [value(p) for p in known], "points", spread)


def cdfs(records: Sequence[RequestRecord]) -> list[str]:
    """Return the plots of the distributions of TTFT, TPOT, ITL and E2EL of completed requests."""
    done = [r for r in records if r.status == OK]
    values: dict[str, list[float]] = {
        "TTFT": [r.ttft_s for r in done if r.ttft_s is not None],
        "TPOT": [r.tpot_s for r in done if r.tpot_s is not None],
        "ITL": [gap_s for r in done for gap_s in r.itl_s],
        "E2EL": [r.e2el_s for r in done],
    }
    charts = []
    for name, seconds in values.items():
        ordered = sorted(s * 1e3 for s in seconds)
        shares = [(i + 1) / len(ordered) for i in range(len(ordered))]
        charts.append(chart([Series("", ordered, shares, "steps")], title=name, x="ms", y="share of requests"
                            if name != "ITL" else "share of tokens"))  # fmt: skip
    return charts


def timelines(records: Sequence[RequestRecord]) -> list[str]:
    """Return the plots over time, as the client saw them: requests waiting and running, TTFT, failures."""
    waiting = [(r.arrival_s, r.end_s if r.first_token_s is None else r.first_token_s) for r in records]
    running = [(r.first_token_s, r.end_s) for r in records if r.first_token_s is not None]
    levels = [
        Series("waiting for the first token", *levels_of(waiting), "steps"),
        Series("running", *levels_of(running), "steps"),
    ]
    late = [(r.arrival_s, r.ttft_s * 1e3) for r in records if r.status == OK and r.ttft_s is not None]
    late.sort()
    by_arrival = [Series("TTFT", [x for x, _ in late], [y for _, y in late])]
    charts = [
        chart(levels, title="Requests over time", x="s", y="requests"),
        chart(by_arrival, title="TTFT by arrival", x="arrival, s", y="ms"),
    ]
    failed = sorted(r.end_s for r in records if r.status == ERROR)
    if failed:
        count = [float(i + 1) for i in range(len(failed))]
        line = Series("", failed, count, "steps")
        charts.append(chart([line], title="Failures so far", x="s", y="requests"))
    return charts


def levels_of(spans: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Return (times, number of the (start, end) spans that are open from each time on)."""
    changes = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    times, counts, level = [0.0], [0.0], 0
    for time_s, change in changes:
        level += change
        times.append(time_s)
        counts.append(float(level))
    return times, counts


def _facts(facts: Mapping[str, Any]) -> TableRows:
    return ("", ""), [[key, str(value)] for key, value in facts.items()]


def _summary(summary: Mapping[str, Any]) -> list[TableRows]:
    """Return the tables of latencies, and of rates and counts."""
    names = ("requests_per_s", "goodput_per_s", "output_tokens_per_s", "input_tokens_per_s", "duration_s",
             "num_requests", "num_completed", "num_cancelled", "num_failed", "num_refused_rows")  # fmt: skip
    rows = [[name.replace("_per_s", "/s").replace("_", " "), summary[name]] for name in names]
    rows += [[f"failed: {kind}", count] for kind, count in summary["errors"].items()]
    rows += [[f"refused: {reason}", count] for reason, count in summary["refused_rows"].items()]
    return [(SUMMARY_HEADER, summary_rows(summary)), (("", ""), rows)]


def _point(p: Mapping[str, Any]) -> list[Any]:
    latencies = [p[key][part] for key in ("ttft_ms", "tpot_ms") for part in ("p50", "p95")]
    return [p["offered_per_s"], p["goodput_per_s"], p["requests_per_s"], p["output_tokens_per_s"], *latencies,
            p["num_failed"]]  # fmt: skip
