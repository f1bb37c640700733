"""Plots that only a simulator can draw, and a measured sweep beside a simulated one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.bench.figures import Series, chart
from quire.bench.page import Page
from quire.errors import ConfigError
from quire.sim.timeline import Point


def timeline_charts(points: Sequence[Point]) -> list[str]:
    """Sequences in the engines and blocks in use over time, as the schedulers see them."""
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
    return sorted(points, key=lambda p: float(p["offered_per_s"]))


def both_sweeps(measured: Sequence[Mapping[str, Any]], simulated: Sequence[Mapping[str, Any]]) -> str:
    """A page with goodput and latency of two sweeps over the same axes."""

    def line(name: str, points: Sequence[Mapping[str, Any]], key: str, part: str | None = None) -> Series:
        value = [p[key] if part is None else p[key][part] for p in points]
        known = [(p["offered_per_s"], v) for p, v in zip(points, value, strict=True) if v is not None]
        return Series(
            name, [x for x, _ in known], [y for _, y in known], "points" if name == "measured" else "line"
        )

    def both(key: str, part: str | None = None) -> list[Series]:
        return [line("measured", measured, key, part), line("simulated", simulated, key, part)]

    page = Page("Measured and simulated")
    page.plots(
        [
            chart(both("goodput_per_s"), title="Goodput", x="offered requests/s", y="requests/s"),
            chart(both("output_tokens_per_s"), title="Output", x="offered requests/s", y="tokens/s"),
            *(
                chart(both(key, part), title=f"{name} {part}", x="offered requests/s", y="ms", log_y=True)
                for key, name in (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"))
                for part in ("p50", "p95")
            ),
        ]
    )
    return page.html()
