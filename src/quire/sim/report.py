"""The summary and plots of a simulation, and a page with a measured and a simulated sweep."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.bench.figures import Series, chart
from quire.bench.page import Section, html_page
from quire.bench.summary import summarize
from quire.errors import ConfigError
from quire.sim.replica import Point
from quire.sim.run import Simulated
from quire.workload.request import Workload
from quire.workload.slo import Slo


def summary_of(result: Simulated, slo: Slo | None, workload: Workload) -> dict[str, Any]:
    """Return the summary of `quire bench serve`, plus the simulator's own figures under ``simulation``."""
    summary = summarize(result.records, slo=slo, refused_rows=workload.refused)
    replicas = [
        {
            "replica": r.number,
            "steps": r.num_steps,
            "busy_s": r.busy_s,
            "kv_peak": r.stats.num_peak_blocks / r.stats.num_blocks,
            "preemptions": r.stats.num_preemptions,
            "cached_tokens": r.stats.num_cached_tokens,
        }
        for r in result.replicas
    ]
    steps = {
        "num_steps": result.num_steps,
        "kv_peak": result.kv_peak,
        "end_s": result.end_s,
        "attainment": summary["num_good"] / max(1, summary["num_requests"]),
        "replica_hours": result.replica_hours,
        "peak_replicas": result.peak_replicas,
        "replicas": replicas,
    }
    return summary | {"simulation": steps}


def timeline_charts(points: Sequence[Point]) -> list[str]:
    """Return plots of the sequences in the engines and the blocks in use over time, as the schedulers see them."""
    times = [p.time_s for p in points]
    levels = [
        Series("running", times, [float(p.num_running) for p in points], "steps"),
        Series("waiting", times, [float(p.num_waiting) for p in points], "steps"),
    ]
    usage = [Series("", times, [100.0 * p.kv_usage for p in points], "steps")]
    return [
        chart(levels, title="Sequences in the engines", x="s", y="sequences"),
        chart(usage, title="KV blocks in use", x="s", y="%"),
    ]


def read_sweep(path: str) -> list[Mapping[str, Any]]:
    """Return the points of the JSON that ``--sweep --json`` of `quire bench serve` or `quire simulate` wrote."""
    try:
        points = json.loads(Path(path).read_text())["sweep"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not the JSON of a --sweep: {error!r}") from error
    return ordered(points)


def ordered(points: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the points by offered load."""
    return sorted(points, key=lambda p: float(p["offered_per_s"]))


def both_sweeps(measured: Sequence[Mapping[str, Any]], simulated: Sequence[Mapping[str, Any]]) -> str:
    """Return a page with goodput and latency of two sweeps over the same axes."""

    def line(name: str, points: Sequence[Mapping[str, Any]], key: str, part: str | None = None) -> Series:
        values = [(p["offered_per_s"], p[key] if part is None else p[key][part]) for p in ordered(points)]
        known = [(x, y) for x, y in values if y is not None]
        style = "points" if name == "measured" else "line"
        return Series(name, [x for x, _ in known], [y for _, y in known], style)

    def both(key: str, part: str | None = None) -> list[Series]:
        return [line("measured", measured, key, part), line("simulated", simulated, key, part)]

    x = "offered requests/s"
    plots = [
        chart(both("goodput_per_s"), title="Goodput", x=x, y="requests/s"),
        chart(both("output_tokens_per_s"), title="Output", x=x, y="tokens/s"),
    ]
    plots += [
        chart(both(key, part), title=f"{name} {part}", x=x, y="ms", log_y=True)
        for key, name in (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"))
        for part in ("p50", "p95")
    ]
    return html_page("Measured and simulated", [Section(plots=plots)])
