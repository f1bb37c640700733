"""`quire simulate`: a workload through simulated engines, with the tables, files and report of `quire bench serve`."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.bench import figures
from quire.bench.page import finite, show, write
from quire.bench.report import run_report, sweep_report
from quire.bench.serve_args import ServeBenchArgs
from quire.bench.sweep import knee, sweep
from quire.bench.table import console, print_summary
from quire.bench.workload import make_workload
from quire.errors import ConfigError
from quire.sim.report import both_sweeps, read_sweep, summary_of, timeline_charts
from quire.sim.run import Simulated, simulate
from quire.sim.setup import Setup, set_up
from quire.sim.simulate_args import SimulateArgs
from quire.workload.build import at_rate
from quire.workload.request import Workload
from quire.workload.slo import Slo


def run(args: SimulateArgs, flags: ServeBenchArgs, settings: Mapping[str, Any]) -> int:
    """Run the command; returns the exit status: 1 where no request completed.

    ``settings``: those of the engine that were given, by flag or in the file of ``--config``.

    Raises:
        ConfigError: a flag is wrong.
    """
    if flags.html:
        figures.need_plots()
    setup = set_up(args, settings, flags.seed)
    flags = replace(flags, max_model_len=setup.config.scheduler.max_model_len)
    workload = make_workload(flags)
    slo = Slo.parse(flags.slo) if flags.slo else None
    if args.beside and not (flags.sweep and flags.html):
        raise ConfigError("--beside draws a measured sweep next to this one: it needs --sweep and --html")
    command = _Command(setup, flags, slo, read_sweep(args.beside) if args.beside else [])
    return command.sweep(workload) if flags.sweep else command.single(workload)


class _Command:
    """Runs, tables and files of one command."""

    def __init__(
        self, setup: Setup, flags: ServeBenchArgs, slo: Slo | None, measured: Sequence[Mapping[str, Any]]
    ) -> None:
        self._measured = measured
        self._setup = setup
        self._flags = flags
        self._slo = slo
        self._out = console()

    def single(self, workload: Workload) -> int:
        result, summary = self._simulate(workload)
        self._show(summary)
        self._files(summary, result)
        if self._flags.html:
            charts = timeline_charts(result.points)
            text = run_report("quire simulate", self._facts(workload), summary, result.records, charts)
            write(self._flags.html, text)
        return 0 if summary["num_completed"] else 1

    def sweep(self, workload: Workload) -> int:
        results: dict[float, Simulated] = {}

        def at(rate: float) -> Mapping[str, Any]:
            results[rate], summary = self._simulate(at_rate(workload, rate))
            summary["offered_per_s"] = rate
            return summary

        points = sweep(at, self._flags.rate or 1.0)
        best = knee(points)
        result = results[best["offered_per_s"]]
        summary = {**best, "knee_per_s": best["offered_per_s"], "sweep": points}
        self._out.print(f"\nknee at {best['offered_per_s']:.4g} requests/s", highlight=False)
        self._show(summary)
        self._files(summary, result)
        if self._flags.html:
            title, facts = "quire simulate --sweep", self._facts(workload)
            page = sweep_report(title, facts, points, best, result.records)
            write(self._flags.html, both_sweeps(self._measured, points) if self._measured else page)
        return 0 if summary["num_completed"] else 1

    def _simulate(self, workload: Workload) -> tuple[Simulated, dict[str, Any]]:
        start_s = time.process_time()
        result = simulate(self._setup.config, self._setup.step_time, workload)
        cpu_s = time.process_time() - start_s
        summary = summary_of(result, self._slo, workload) | {"run": self._facts(workload)}
        self._out.print(
            f"{workload.source}: {result.num_steps:,} steps planned by the scheduler, {result.end_s:.1f} s simulated "
            f"in {cpu_s:.2f} s of one core ({result.end_s / max(cpu_s, 1e-9):.0f} × real time); goodput "
            f"{show(summary['goodput_per_s'])}/s",
            highlight=False,
        )
        return result, summary

    def _show(self, summary: Mapping[str, Any]) -> None:
        print_summary(self._out, summary)
        steps = summary["simulation"]
        self._out.print(
            f"KV peak {steps['kv_peak']:.1%}; busy "
            + ", ".join(f"{r['busy_s'] / max(steps['end_s'], 1e-9):.0%}" for r in steps["replicas"]),
            highlight=False,
        )

    def _facts(self, workload: Workload) -> dict[str, Any]:
        config = self._setup.config
        return {
            **self._setup.facts,
            "workload": workload.source,
            "replicas": f"{config.num_replicas}, {config.routing}",
            "engine": f"{config.scheduler.gate}, {config.scheduler.order}, {config.scheduler.max_num_seqs} sequences "
            f"and {config.scheduler.max_num_batched_tokens} tokens a step, {config.cache.num_blocks} blocks of "
            f"{config.cache.block_size} tokens, prefix cache {'on' if config.cache.enable_prefix_caching else 'off'}",
            "seed": self._flags.seed,
            "slo": str(self._slo) if self._slo else "none",
        }

    def _files(self, summary: Mapping[str, Any], result: Simulated) -> None:
        if self._flags.json:
            write(self._flags.json, json.dumps(finite(summary), indent=2, allow_nan=False) + "\n")
        if self._flags.jsonl:
            lines = (json.dumps(record.as_dict(), allow_nan=False) for record in result.records)
            write(self._flags.jsonl, "".join(f"{line}\n" for line in lines))
