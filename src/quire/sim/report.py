"""`quire simulate`: a workload through simulated engines, with the tables, files and report of `quire bench serve`."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from quire.bench.args import ServeBenchArgs, SimulateArgs
from quire.bench.figures import Series, chart
from quire.bench.page import Section, console, html_page, show
from quire.bench.runs import Measured, Outcome, make_workload
from quire.bench.summary import summarize
from quire.errors import ConfigError
from quire.sim.replica import Point
from quire.sim.run import Simulated, simulate
from quire.sim.setup import Setup, set_up
from quire.workload.request import Workload
from quire.workload.slo import Slo


def run(args: SimulateArgs, flags: ServeBenchArgs, settings: Mapping[str, Any]) -> int:
    """Run the command; return the exit status: 1 where no request completed.

    ``settings``: the engine's settings that were given by flag or in the file of ``--config``.

    Raises:
        ConfigError: a flag is wrong.
    """
    setup = set_up(args, flags, settings)
    flags = replace(flags, max_model_len=setup.config.scheduler.max_model_len)
    workload = make_workload(flags)
    slo = Slo.parse(flags.slo) if flags.slo else None
    if args.beside and not (flags.sweep and flags.html):
        raise ConfigError("--beside draws a measured sweep next to this one: it needs --sweep and --html")
    facts = _facts(setup, workload, flags.seed, slo)
    measured = read_sweep(args.beside) if args.beside else []
    page = (lambda points: both_sweeps(measured, points)) if measured else None
    return Measured("quire simulate", flags, partial(_simulated, setup, slo), facts, page).run(workload)


def _simulated(setup: Setup, slo: Slo | None, workload: Workload, what: str) -> Outcome:
    start_s = time.process_time()
    result = simulate(setup.config, setup.step_time, workload)
    cpu_s = time.process_time() - start_s
    summary = summary_of(result, slo, workload)
    console().print(
        f"{workload.source}: {result.num_steps:,} steps planned by the scheduler, {result.end_s:.1f} s simulated "
        f"in {cpu_s:.2f} s of one core ({result.end_s / max(cpu_s, 1e-9):.0f} × real time); goodput "
        f"{show(summary['goodput_per_s'])}/s",
        highlight=False,
    )
    steps = summary["simulation"]
    busy = ", ".join(f"{r['busy_s'] / max(steps['end_s'], 1e-9):.0%}" for r in steps["replicas"])
    return Outcome(
        summary,
        result.records,
        partial(timeline_charts, result.points),
        f"KV peak {steps['kv_peak']:.1%}; busy {busy}",
    )


def _facts(setup: Setup, workload: Workload, seed: int, slo: Slo | None) -> dict[str, Any]:
    config = setup.config
    return {
        **setup.facts,
        "workload": workload.source,
        "replicas": f"{config.num_replicas}, {config.routing}",
        "engine": f"{config.scheduler.gate}, {config.scheduler.order}, {config.scheduler.max_num_seqs} sequences "
        f"and {config.scheduler.max_num_batched_tokens} tokens a step, {config.cache.num_blocks} blocks of "
        f"{config.cache.block_size} tokens, prefix cache {'on' if config.cache.enable_prefix_caching else 'off'}",
        "seed": seed,
        "slo": str(slo) if slo else "none",
    }


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
