"""What `quire bench serve` and `quire simulate` do alike: run a workload, or raise its load; print, and write files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.bench.page import finite, write
from quire.bench.report import run_report, sweep_report
from quire.bench.serve_args import ServeBenchArgs
from quire.bench.summary import RequestRecord
from quire.bench.sweep import knee, sweep
from quire.bench.table import console, print_summary
from quire.workload.build import at_rate
from quire.workload.request import Workload

# Draws the page of a sweep in place of the usual one, from its points.
SweepPage = Callable[[Sequence[Mapping[str, Any]]], str]


@dataclass(slots=True)
class Outcome:
    """One run."""

    summary: dict[str, Any]
    records: Sequence[RequestRecord]
    charts: Callable[[], Sequence[str]] = tuple  # for its report, beside those of every run
    note: str = ""  # printed below the summary


@dataclass(slots=True)
class Measured:
    """One command. ``measure``: a workload, and what is said of it while it runs, to its outcome."""

    title: str
    flags: ServeBenchArgs
    measure: Callable[[Workload, str], Outcome]
    facts: Mapping[str, Any]
    sweep_page: SweepPage | None = None

    def run(self, workload: Workload) -> int:
        """Return the exit status: 1 where no request completed."""
        return self._sweep(workload) if self.flags.sweep else self._single(workload)

    def _single(self, workload: Workload) -> int:
        outcome = self.measure(workload, "")

        def page() -> str:
            return run_report(self.title, self.facts, outcome.summary, outcome.records, outcome.charts())

        return self._end(outcome, outcome.summary, page)

    def _sweep(self, workload: Workload) -> int:
        outcomes: dict[float, Outcome] = {}

        def at(rate: float) -> Mapping[str, Any]:
            outcome = outcomes[rate] = self.measure(at_rate(workload, rate), f"{rate:.3g}/s")
            outcome.summary["offered_per_s"] = rate
            return outcome.summary

        points = sweep(at, self.flags.rate or 1.0)
        best = knee(points)
        rate, outcome = best["offered_per_s"], outcomes[best["offered_per_s"]]
        console().print(f"\nknee at {rate:.4g} requests/s", highlight=False)

        def page() -> str:
            if self.sweep_page is not None:
                return self.sweep_page(points)
            return sweep_report(f"{self.title} --sweep", self.facts, points, best, outcome.records)

        return self._end(outcome, {**best, "knee_per_s": rate, "sweep": points}, page)

    def _end(self, outcome: Outcome, summary: Mapping[str, Any], page: Callable[[], str]) -> int:
        out, flags = console(), self.flags
        print_summary(out, summary)
        if outcome.note:
            out.print(outcome.note, highlight=False)
        if flags.json:
            said = finite({**summary, "run": self.facts})
            write(flags.json, json.dumps(said, indent=2, allow_nan=False) + "\n")
        if flags.jsonl:
            lines = (json.dumps(record.as_dict(), allow_nan=False) for record in outcome.records)
            write(flags.jsonl, "".join(f"{line}\n" for line in lines))
        if flags.html:
            write(flags.html, page())
        return 0 if summary["num_completed"] else 1
