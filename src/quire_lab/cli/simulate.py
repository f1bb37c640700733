"""`quire simulate`: a workload through simulated engines, with the tables, files and report of `quire bench serve`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from quire.cost.cost_model import Scaled
from quire.cost.kept_profiles import kept
from quire.errors import ConfigError
from quire.slo import Slo
from quire_lab.bench.args import ServeBenchArgs, SimulateArgs
from quire_lab.bench.page import console, show
from quire_lab.bench.progress import ticking
from quire_lab.bench.runs import Measured, Outcome, make_workload
from quire_lab.plan.capacity import NEAR
from quire_lab.sim.decision import Side, decide
from quire_lab.sim.run import both_sweeps, read_sweep, simulate, summary_of, timeline_charts
from quire_lab.sim.scenario import value_of
from quire_lab.sim.setup import Setup, set_up
from quire_lab.workload.request import Workload


def run(args: SimulateArgs, flags: ServeBenchArgs, settings: Mapping[str, Any]) -> int:
    """Run the command; return the exit status: 1 where no request completed.

    ``settings``: the engine's settings that were given by flag or in the file of ``--config``.

    Raises:
        ConfigError: a flag is wrong.
    """
    args = _with_profile(args)
    setup = set_up(args, flags, settings)
    flags = replace(flags, max_model_len=setup.config.scheduler.max_model_len)
    workload = make_workload(flags)
    slo = Slo.parse(flags.slo) if flags.slo else None
    if args.beside and not (flags.sweep and flags.html):
        raise ConfigError("--beside draws a measured sweep next to this one: it needs --sweep and --html")
    if args.versus and flags.sweep:
        raise ConfigError("--versus compares two settings under one load: leave --sweep out")
    facts = _facts(setup, workload, flags.seed, slo)
    measured = read_sweep(args.beside) if args.beside else []
    page = (lambda points: both_sweeps(measured, points)) if measured else None
    status = Measured("quire simulate", flags, partial(_simulated, setup, slo), facts, page).run(workload)
    if args.versus:
        with ticking(lambda s: f"… simulating {args.draws} draws of both settings for {s:.0f} s"):
            decision = decide(Side("as given", args, flags, settings), args.versus, args.draws)
        console().print(str(decision), highlight=False)
    return status


def _with_profile(args: SimulateArgs) -> SimulateArgs:
    """Return ``args`` with the newest profile that `quire profile` kept, where they name no step times."""
    if args.profile is not None or args.hardware is not None:
        return args
    profile = kept(args.model)
    if profile is None:
        of = "" if args.model is None else f" of {args.model}"
        raise ConfigError(
            f"there are no step times{of}: `quire profile` measures this machine's; or give "
            "--profile FILE, or --hardware NAME with --model NAME"
        )
    return replace(args, profile=str(profile[0]))


def _simulated(setup: Setup, slo: Slo | None, workload: Workload, what: str) -> Outcome:
    start_s = time.process_time()
    with ticking(lambda s: f"… simulating {workload.source} {what} for {s:.0f} s".replace("  ", " ")):
        result = simulate(setup.config, setup.step_time, workload, scaling=setup.scaling)
        cpu_s = time.process_time() - start_s
        states = [] if what else _states(setup, slo, workload)
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
        f"KV peak {steps['kv_peak']:.1%}; busy {busy}"
        + (f"; bubbles {steps['bubbles']:.1%}" if setup.config.num_stages > 1 else "")
        + _transferred(steps.get("transferred"))
        + (f"; {steps['replica_hours']:.2f} replica-hours" if setup.scaling else "")
        + _range(setup, states),
    )


def _transferred(total: Mapping[str, float] | None) -> str:
    """Return a text on the transfers between prefill and decode replicas."""
    if not total or not total["num_transfers"]:
        return ""
    wait, move = (total[name] / total["num_transfers"] * 1e3 for name in ("wait_s", "move_s"))
    return (
        f"; {total['num_transfers']:,} transfers of {total['num_bytes'] / 1e9:.2f} GB, mean {move:.1f} ms on the link "
        f"after {wait:.1f} ms for it"
    )


def _states(setup: Setup, slo: Slo | None, workload: Workload) -> list[dict[str, Any]]:
    """Return the summaries of the same run in the machine's fast and slow state, as its profile saw them."""
    if setup.spread is None or setup.spread.slow <= setup.spread.fast:
        return []
    summaries = []
    for factor in (setup.spread.fast, setup.spread.slow):
        result = simulate(setup.config, Scaled(setup.step_time, factor), workload, scaling=setup.scaling)
        summaries.append(summary_of(result, slo, workload))
    return summaries


NEAR_TTFT = 2.0  # times the fast state's TTFT


def _range(setup: Setup, states: list[dict[str, Any]]) -> str:
    """Return the line with the range between the two states, and a warning where they differ by more than a factor."""
    if not states:
        return ""
    fast, slow = states
    assert setup.spread is not None

    def both(name: str) -> tuple[float, float]:
        return tuple(value_of(state, name) or 0.0 for state in states)  # type: ignore[return-value]

    ttft, tpot = both("ttft_ms.p50"), both("tpot_ms.p50")
    text = (
        f"\nfast … slow state of the machine ({setup.spread.fast:.2f} … {setup.spread.slow:.2f} of the step times): "
        f"TTFT p50 {show(ttft[0])} … {show(ttft[1])} ms, TPOT p50 {show(tpot[0])} … {show(tpot[1])} ms, goodput "
        f"{show(fast['goodput_per_s'])} … {show(slow['goodput_per_s'])}/s"
    )
    past = slow["goodput_per_s"] < NEAR * fast["goodput_per_s"] or ttft[1] > NEAR_TTFT * ttft[0]
    near = "\nwarning: the load is within this spread of the knee: the figures above may be off by the whole range"
    return text + near if past else text


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
