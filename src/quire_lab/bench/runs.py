"""The part that `quire bench serve` and `quire simulate` share: make a workload, run it, print and write the results.

With ``--sweep`` the load is raised until goodput falls, and the knee is reported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.errors import ConfigError
from quire.slo import Slo
from quire_lab.bench.args import ServeBenchArgs, with_workload
from quire_lab.bench.page import console, finite, print_summary, run_report, sweep_report, write
from quire_lab.bench.summary import RequestRecord
from quire_lab.workload.build import Synthetic, at_rate, from_trace, with_cancellations
from quire_lab.workload.distributions import Arrivals, parse_lengths
from quire_lab.workload.request import Workload
from quire_lab.workload.traces import read_trace

# Returns the page of a sweep, in place of the usual one, from the sweep's points.
SweepPage = Callable[[Sequence[Mapping[str, Any]]], str]


@dataclass(slots=True)
class Outcome:
    """One run."""

    summary: dict[str, Any]
    records: Sequence[RequestRecord]
    charts: Callable[[], Sequence[str]] = tuple  # for the report, after those of every run
    note: str = ""  # printed below the summary


@dataclass(slots=True)
class Measured:
    """One command. ``measure(workload, label)`` runs a workload; ``label`` is shown while it runs."""

    title: str
    flags: ServeBenchArgs
    measure: Callable[[Workload, str], Outcome]
    facts: Mapping[str, Any]
    sweep_page: SweepPage | None = None

    def run(self, workload: Workload) -> int:
        """Run and report; return the exit status: 1 where no request completed."""
        return self._sweep(workload) if self.flags.sweep else self._single(workload)

    def _single(self, workload: Workload) -> int:
        outcome = self.measure(workload, "")

        def page() -> str:
            return run_report(self.title, self.facts, outcome.summary, outcome.records, outcome.charts())

        return self._end(outcome, outcome.summary, page)

    def _sweep(self, workload: Workload) -> int:
        outcomes: dict[float, Outcome] = {}

        flags = [replace(self.flags, seed=self.flags.seed + i) for i in range(1, self.flags.sweep_runs)]
        workloads = [workload, *map(make_workload, flags)]

        def at(rate: float) -> Mapping[str, Any]:
            runs = [self.measure(at_rate(source, rate), f"{rate:.3g}/s") for source in workloads]
            runs.sort(key=lambda run: float(run.summary["goodput_per_s"]))
            outcome = outcomes[rate] = runs[len(runs) // 2]
            if len(runs) > 1:
                outcome.summary["runs"] = [{key: run.summary[key] for key in SPREAD} for run in runs]
            outcome.summary["offered_per_s"] = rate
            return outcome.summary

        points = sweep(at, self.flags.rate or 1.0)
        best = knee(points)
        rate, outcome = best["offered_per_s"], outcomes[best["offered_per_s"]]
        console().print(f"\nknee at {rate:.4g} requests/s", highlight=False)

        def page() -> str:
            if self.sweep_page is not None:
                return self.sweep_page(points)
            slo = Slo.parse(self.flags.slo) if self.flags.slo else None
            return sweep_report(f"{self.title} --sweep", self.facts, points, best, outcome.records, slo)

        return self._end(outcome, {**best, "knee_per_s": rate, "sweep": points}, page)

    def _end(self, outcome: Outcome, summary: Mapping[str, Any], page: Callable[[], str]) -> int:
        out, flags = console(), self.flags
        print_summary(out, summary)
        if outcome.note:
            out.print(outcome.note, highlight=False)
        if flags.json:
            report = finite({**summary, "run": self.facts})
            write(flags.json, json.dumps(report, indent=2, allow_nan=False) + "\n")
        if flags.jsonl:
            lines = (json.dumps(record.as_dict(), allow_nan=False) for record in outcome.records)
            write(flags.jsonl, "".join(f"{line}\n" for line in lines))
        if flags.html:
            write(flags.html, page())
        return 0 if summary["num_completed"] else 1


GROWTH = 2.0  # factor of the load from one run to the next, on the way up
FALLEN = 0.8  # share of the best goodput; below it the knee is past
FOLLOWS = 0.5  # share of the load's growth; goodput that grows less lags
MAX_RUNS_UP = 14
# Of each run of a load, beside the run of median goodput.
SPREAD = ("goodput_per_s", "requests_per_s", "output_tokens_per_s", "ttft_ms", "tpot_ms", "e2el_ms")
Run = Callable[[float], Mapping[str, Any]]  # offered requests/s → summary with ``goodput_per_s``


def sweep(run: Run, start_rate: float, refinements: int = 3) -> list[Mapping[str, Any]]:
    """Run loads from ``start_rate`` up until goodput falls or stops growing, then loads between the runs at the knee.

    Return the summaries in the order of the loads, each with ``offered_per_s``.
    """
    points: dict[float, Mapping[str, Any]] = {}
    rate = start_rate
    for _ in range(MAX_RUNS_UP):
        points[rate] = run(rate)
        if _is_past(list(points.values())):
            break
        rate *= GROWTH
    for _ in range(refinements):
        between = _next_between(sorted(points), knee(list(points.values()))["offered_per_s"])
        if between is None:
            break
        points[between] = run(between)
    return [points[rate] for rate in sorted(points)]


def knee(points: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the summary of the last load that goodput follows.

    Up to there, from each load to the next, goodput grows by at least `FOLLOWS` of the growth of the load (both in
    logarithms).
    """
    ordered = sorted(points, key=lambda p: float(p["offered_per_s"]))
    last = ordered[0]
    for point in ordered[1:]:
        before, now = float(last["goodput_per_s"]), float(point["goodput_per_s"])
        load = math.log(point["offered_per_s"] / last["offered_per_s"])
        if before > 0 and (now <= 0 or math.log(now / before) < FOLLOWS * load):
            break
        last = point
    return last if last["goodput_per_s"] > 0 else ordered[0]


def _is_past(points: Sequence[Mapping[str, Any]]) -> bool:
    """Whether goodput fell well below the best, is 0 at two loads, or did not grow over three loads in a row."""
    goodputs = [float(p["goodput_per_s"]) for p in points]
    best = max(goodputs)
    if goodputs[-1] < FALLEN * best:
        return True
    if best == 0.0:
        return len(points) >= 2
    return len(goodputs) >= 3 and max(goodputs[-2:]) <= 1.02 * goodputs[-3]


def _next_between(rates: Sequence[float], knee_rate: float) -> float | None:
    """Return the geometric middle of the wider gap beside the knee; None where both gaps are below 5 %."""
    place = rates.index(knee_rate)
    gaps = [(rates[i + 1] / rates[i], rates[i]) for i in (place - 1, place) if 0 <= i < len(rates) - 1]
    wide = max(gaps, default=(1.0, knee_rate))
    return None if wide[0] < 1.05 else wide[1] * math.sqrt(wide[0])


DEFAULT_REQUESTS = 100


def make_workload(flags: ServeBenchArgs) -> Workload:
    """Return the workload that the flags describe."""
    flags, arrivals = with_workload(flags), None
    if flags.rate is not None or flags.sweep:
        arrivals = Arrivals(flags.rate or 1.0, flags.burstiness, flags.ramp_to)
    elif flags.burstiness != 1.0 or flags.ramp_to is not None:
        raise ConfigError("--burstiness and --ramp-to need --rate")
    if flags.trace is not None:
        trace = read_trace(flags.trace)
        if flags.sweep and flags.rate is None and trace.timed:
            arrivals = None  # the trace keeps its own times, stretched
        workload = from_trace(
            trace,
            limit=flags.limit,
            max_model_len=flags.max_model_len,
            arrivals=arrivals,
            time_scale=flags.time_scale,
            seed=flags.seed,
        )
    elif flags.time_scale != 1.0:
        raise ConfigError("--time-scale stretches the times of a --trace")
    else:
        workload = Synthetic(
            flags.limit or DEFAULT_REQUESTS,
            parse_lengths(flags.input_len, "--input-len"),
            parse_lengths(flags.output_len, "--output-len"),
            arrivals or Arrivals(),
            flags.prefix_len,
            flags.num_prefixes,
            flags.turns,
            flags.think_s,
        ).build(flags.seed, flags.max_model_len)
    return with_cancellations(workload, flags.cancel, flags.seed) if flags.cancel else workload
