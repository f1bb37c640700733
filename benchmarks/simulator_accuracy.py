"""How well the simulator predicts the live engine: measured step times, real traces, real HTTP.

    python benchmarks/simulator_accuracy.py                     one cell: the one with the fewest rounds so far
    python benchmarks/simulator_accuracy.py --all --rounds 5    until every cell has 5 rounds (hours; resumable)
    python benchmarks/simulator_accuracy.py --status            what is done and what is left
    python benchmarks/simulator_accuracy.py --render            write the tables into docs/simulator.md

The engine has one thread, in the profile and live: API process and load generator need a CPU too, and a machine of two
has only one more. With two threads the engine would take turns with them, which happens in practice only where the
client runs on the same machine. Nothing is pinned.

A cell is a model, a trace and a load (0.5, 0.8 or 1.0 of the knee). One round of it is: the trace's first ``--limit``
rows that fit against a fresh `quire serve`, between two profiles of the steps, and the simulation of the same requests
with a fit to the points of both: the machine's speed drifts within minutes. What serving adds is measured once per
model and round. The same requests are simulated once more with the step times that the live run logged itself
(``--step-log``): without the drift, what is left is the error of the cost model's form and of the simulation.
Lengths are the trace's; only time is stretched. The knee of (model, trace) is the simulator's, from the
first profile: the smallest load with 95 % of the best goodput under
``--slo``, which is lax because the traces come in bursts: their first 300 rows at a load that meets a strict one take
20 minutes of azure_code on one thread. All results are appended to ``--results``; an invocation that is killed loses
one cell.

Gates: median TTFT, TPOT and output tokens/s within max(8 %, 1.5 × floor), p99 within max(20 %, 2 × floor), KV
peak within 2 %. The floor is the live runs' own spread: the largest distance of a round from the median of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quire.cost.fit import fit
from quire.cost.profile import Profile, fit_steps, load_profile, read_steps
from quire.slo import Slo
from quire_lab.bench.args import ServeBenchArgs, SimulateArgs
from quire_lab.bench.client import StreamingClient, Target, api_url
from quire_lab.bench.load import Load, Runner
from quire_lab.bench.profile_serving import LiveServer
from quire_lab.bench.runs import knee, sweep
from quire_lab.bench.summary import RequestRecord, summarize
from quire_lab.sim.requests import FIRST_ID, VOCAB_SIZE
from quire_lab.sim.run import simulate
from quire_lab.sim.setup import Setup, set_up
from quire_lab.workload.build import at_rate, from_trace
from quire_lab.workload.request import PromptMaker, Workload, WorkloadRequest
from quire_lab.workload.traces import read_trace

ROOT = Path(__file__).resolve().parents[1]
NUM_DRAFTS = 2  # of the model that speculates
MODELS = {
    "quill": ["quill", "--threads", "1"],
    "quill-speculates": ["quill", "--threads", "1", "--speculate", "draft", "--spec-tokens", str(NUM_DRAFTS)],
    "smol-135m": [
        "/tmp/models/smol-135m", "--load-format", "random", "--max-model-len", "4096", "--threads", "1",
        "--quantize", "int8",
    ],
}  # fmt: skip
PUBLISHED = ["quill", "smol-135m"]
TRACES = {
    "azure_conv": "azure_llm_2023_conv.csv.gz",
    "azure_code": "azure_llm_2023_code.csv.gz",
    "rtp-llm": "rtp_llm_online_30min.jsonl.gz",
}
LOADS = (0.5, 0.8, 1.0)
MANY_PER_S = 1e6
BUSY = 0.1  # share of the CPUs that others may use before a round
PAUSE_S = 20.0  # until the next look where they use more
MARKS = ("<!-- accuracy: begin -->", "<!-- accuracy: end -->")
SOURCES = {"simulated": "profile", "from_log": "step log"}  # of step times, as the results name them
# (name in the table, key of the summary, part of it, gate, times the floor)
FIGURES: tuple[tuple[str, str, str | None, float, float], ...] = (
    ("TTFT p50", "ttft_ms", "p50", 0.08, 1.5),
    ("TPOT p50", "tpot_ms", "p50", 0.08, 1.5),
    ("tokens/s", "output_tokens_per_s", None, 0.08, 1.5),
    ("TTFT p99", "ttft_ms", "p99", 0.20, 2.0),
    ("TPOT p99", "tpot_ms", "p99", 0.20, 2.0),
    ("KV peak", "kv_peak", None, 0.02, 0.0),
)


class Results:
    """The file of all rounds, written after each step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: dict[str, Any] = {"knees": {}, "rounds": {}}
        if path.exists():
            self.data = json.loads(path.read_text())

    def rounds(self, cell: str) -> list[dict[str, Any]]:
        return list(self.data["rounds"].get(cell, []))

    def add(self, cell: str, figures: Mapping[str, Any]) -> None:
        self.data["rounds"].setdefault(cell, []).append(figures)
        self.save()

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.data, indent=1) + "\n")


def cells(models: Sequence[str], traces: Sequence[str], loads: Sequence[float]) -> list[str]:
    return [f"{model}/{trace}/{load:g}" for model in models for trace in traces for load in loads]


def next_cell(results: Results, names: Sequence[str], rounds: int) -> str | None:
    """The first cell with the fewest rounds, or None where all have enough: rounds are interleaved over cells."""
    fewest = min(names, key=lambda name: len(results.rounds(name)))
    return fewest if len(results.rounds(fewest)) < rounds else None


def run_cell(args: argparse.Namespace, results: Results, cell: str) -> None:
    """One round of one cell: profile if the round has none, live, simulated."""
    model, trace, load = cell.split("/")
    while (busy := busy_share()) > BUSY and not args.any_load:
        say(f"other processes keep {busy:.0%} of the CPUs busy, which would spoil the measurement: waiting")
        time.sleep(PAUSE_S)
    number = len(results.rounds(cell))
    # The first of a round is made here; then it is the one that was made behind the last live run.
    before = args.results.parent / f"{args.results.stem}-{model}-{number}.json"
    if not before.exists():
        measure_profile(args, model, before, serving=True)
    setup = set_up(SimulateArgs(profile=str(before)), ServeBenchArgs(), {})
    limit = setup.config.scheduler.max_model_len
    workload = from_trace(read_trace(args.traces / TRACES[trace]), limit=args.limit, max_model_len=limit)
    rate = float(load) * knee_of(args, results, f"{model}/{trace}", setup, workload)
    workload = at_rate(workload, rate)
    say(f"{cell}, round {number}: {len(workload.requests)} requests at {rate:.3g}/s, live …")
    log = before.with_suffix(".steps.jsonl")
    log.unlink(missing_ok=True)
    with LiveServer([*MODELS[model], "--port", "0", "--step-log", str(log)]) as server:
        start_s = time.monotonic()
        records = asyncio.run(ask(server.url, MODELS[model][0], workload))
        live = figures_of(records, workload) | {"kv_peak": kv_peak(server.url)}
        wall_s = time.monotonic() - start_s
    after = before.with_suffix(".after.json")
    measure_profile(args, model, after, serving=False)
    around, logged = before.with_suffix(".around.json"), before.with_suffix(".log.json")
    by_log = of_log(log, before)
    by_log.save(logged)
    accepting(merged(before, after), by_log).save(around)
    merged(after, host_of=before).save(before)
    simulated, from_log = simulated_with(around, workload), simulated_with(logged, workload)
    results.add(
        cell,
        {
            "round": number,
            "rate": rate,
            "num_requests": len(workload.requests),
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "busy_before": busy,
            "refused_rows": dict(workload.refused),
            "profile_error": json.loads(around.read_text())["error"],
            "live": live,
            "simulated": simulated,
            "from_log": from_log,
        },
    )
    say(f"{cell}, round {number}: {wall_s:.0f} s; simulated against live")
    for name, made in (("profile", simulated), ("step log", from_log)):
        errors = ", ".join(
            f"{figure} {value(made, key, part) / value(live, key, part) - 1:+.1%}"
            for figure, key, part, _, _ in FIGURES
        )
        say(f"    by the {name:8} {errors}")


def simulated_with(profile: Path, workload: Workload) -> dict[str, Any]:
    drafts = {"num_drafts": NUM_DRAFTS} if load_profile(profile).draft else {}
    setup = set_up(SimulateArgs(profile=str(profile), **drafts), ServeBenchArgs(), {})
    result = simulate(setup.config, setup.step_time, workload)
    return figures_of(result.records, workload) | {"kv_peak": result.kv_peak}


def busy_share(seconds: float = 1.0) -> float:
    """The share of the CPUs that other processes use just now (/proc/stat: this one sleeps)."""

    def ticks() -> tuple[int, int]:
        spent = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return sum(spent) - spent[3] - spent[4], sum(spent)

    before = ticks()
    time.sleep(seconds)
    after = ticks()
    return (after[0] - before[0]) / max(1, after[1] - before[1])


def measure_profile(args: argparse.Namespace, model: str, path: Path, *, serving: bool) -> None:
    say(f"profile of {model} …")
    command = [sys.executable, "-m", "quire.cli", "profile", *MODELS[model], "--out", str(path)]
    path.parent.mkdir(parents=True, exist_ok=True)
    seconds = ["--seconds", str(args.profile_seconds), "--serving" if serving else "--no-serving"]
    subprocess.run([*command, *seconds], check=True)


def merged(*paths: Path, host_of: Path | None = None) -> Profile:
    """One profile fitted to the points of all, with what serving adds from the first of them or from ``host_of``."""
    first, *others = (load_profile(path) for path in paths)
    points = [*first.points, *(point for other in others for point in other.points)]
    host = load_profile(host_of).host if host_of else first.host
    return replace(first, executor=fit(points), host=host, points=tuple(points))


def accepting(profile: Profile, by_log: Profile) -> Profile:
    """``profile`` with the acceptance of drafts in the live run: it depends on the texts of the requests."""
    if profile.draft is None or by_log.draft is None:
        return profile
    return replace(profile, draft=replace(profile.draft, acceptance=by_log.draft.acceptance))


def of_log(log: Path, profile: Path) -> Profile:
    """``profile`` with the step times of a live run; the way of a request stays the profile's."""
    made, found = load_profile(profile), fit_steps(read_steps(log))
    way = made.host
    host = replace(found.host, request_s=way.request_s, per_prompt_token_s=way.per_prompt_token_s)
    return replace(made, executor=found.executor, host=host, points=found.points, draft=found.draft)


def knee_of(args: argparse.Namespace, results: Results, key: str, setup: Setup, workload: Workload) -> float:
    """Return the requests/s at the simulated knee; found once, then kept in the results."""
    if key not in results.data["knees"]:
        slo = Slo.parse(args.slo)

        def at(rate: float) -> Mapping[str, Any]:
            done = simulate(setup.config, setup.step_time, at_rate(workload, rate))
            return summarize(done.records, slo=slo) | {"offered_per_s": rate}

        most = at(MANY_PER_S)["requests_per_s"]  # all at once: what the engine carries
        results.data["knees"][key] = float(knee(sweep(at, most / 4))["offered_per_s"])
        results.save()
    return float(results.data["knees"][key])


async def ask(url: str, model: str, workload: Workload) -> list[RequestRecord]:
    """Send the workload; a few requests before it warm the server up."""
    client = StreamingClient(Target(api_url(url), model))
    warm = [WorkloadRequest(0.0, 64, 8, index=i) for i in range(4)]
    try:
        await Runner(client, PromptMaker(VOCAB_SIZE, 999, FIRST_ID), Load()).run(warm)
        return await Runner(client, PromptMaker(VOCAB_SIZE, 0, FIRST_ID), Load()).run(workload.requests)
    finally:
        await client.close()


def kv_peak(url: str) -> float:
    """The largest share of the blocks that was held, as the server says."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    peak, blocks = (
        next(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))
        for name in ("quire:kv_blocks_peak", "quire:kv_blocks")
    )
    return peak / blocks


def figures_of(records: Sequence[RequestRecord], workload: Workload) -> dict[str, Any]:
    summary = summarize(records, refused_rows=workload.refused)
    keep = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms", "output_tokens_per_s", "num_completed", "num_failed",
            "num_cached_tokens", "duration_s")  # fmt: skip
    return {key: summary[key] for key in keep}


def value(figures: Mapping[str, Any], key: str, part: str | None) -> float:
    found = figures[key] if part is None else figures[key][part]
    return float(found) if found is not None else float("nan")


def judge(
    rounds: Sequence[Mapping[str, Any]], key: str, part: str | None, by: str = "simulated"
) -> tuple[float, float, float, float]:
    """Return (live, simulated, error, floor): medians over the rounds, and the live runs' own spread."""
    live = [value(r["live"], key, part) for r in rounds]
    middle = statistics.median(live)
    simulated = statistics.median(value(r[by], key, part) for r in rounds)
    floor = max(abs(x / middle - 1.0) for x in live) if middle else 0.0
    return middle, simulated, abs(simulated / middle - 1.0) if middle else 0.0, floor


def tables(results: Results) -> str:
    """Markdown: a table a model, each figure as live → simulated, with its error, the floor, and whether it holds.

    A cell has a row for each source of step times: profiles around the live run, and the live run's step log.
    """
    done = {cell: rounds for cell, rounds in results.data["rounds"].items() if rounds}
    if not done:
        return "No round has been run yet.\n"
    held, total = dict.fromkeys(SOURCES, 0), dict.fromkeys(SOURCES, 0)
    text = []
    for model in dict.fromkeys(cell.split("/")[0] for cell in done):
        head = "| trace, load | rounds | step times |" + "".join(f" {name} |" for name, *_ in FIGURES)
        text += [f"\n**{model}**\n", head, "|---|---|---|" + "---|" * len(FIGURES)]
        for cell, rounds in done.items():
            if cell.split("/")[0] != model:
                continue
            name = f"{cell.split('/')[1]}, {cell.split('/')[2]} ({rounds[0]['rate']:.3g}/s)"
            for by, source in SOURCES.items():
                row = [name, str(len(rounds)), source]
                for _, key, part, gate, times in FIGURES:
                    live, simulated, error, floor = judge(rounds, key, part, by)
                    ok = error <= max(gate, times * floor)
                    held[by], total[by] = held[by] + ok, total[by] + 1
                    row.append(
                        f"{live:.3g} → {simulated:.3g} ({error:.1%}, floor {floor:.1%}){'' if ok else ' **✗**'}"
                    )
                text.append("| " + " | ".join(row) + " |")
                name = ""
    refused = {cell: r[0]["refused_rows"] for cell, r in done.items() if r[0]["refused_rows"]}
    limits = sorted({r["num_requests"] for rounds in done.values() for r in rounds})
    last = max(r["at"] for rounds in done.values() for r in rounds)
    counts = ", ".join(f"{held[by]} of {total[by]} by the {source}" for by, source in SOURCES.items())
    text.append(
        f"\nFigures within their gates: {counts}. {' or '.join(map(str, limits))} requests a run, the "
        f"engine on one thread. Last round {last}."
    )
    text += [errors_of_rounds(done, by, source) for by, source in SOURCES.items()]
    for cell, rows in refused.items():
        text.append(f"Rows refused, {cell}: {sum(rows.values())} ({', '.join(map(str, rows))}).")
    return "\n".join(text) + "\n"


def errors_of_rounds(done: Mapping[str, Sequence[Mapping[str, Any]]], by: str, source: str) -> str:
    """A line: how far single rounds are off, over all cells. Medians hide a drift that a round does not."""
    parts = []
    for name, key, part, _, _ in FIGURES:
        errors = [
            abs(value(r[by], key, part) / value(r["live"], key, part) - 1.0)
            for rounds in done.values()
            for r in rounds
        ]
        parts.append(f"{name} {statistics.median(errors):.1%} ({max(errors):.0%})")
    return f"Each round by itself, by the {source}, median error (worst): {', '.join(parts)}."


def render(results: Results) -> None:
    page = ROOT / "docs" / "simulator.md"
    before, _, rest = page.read_text().partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    page.write_text(f"{before}{MARKS[0]}\n{tables(results)}{MARKS[1]}{after}")
    say(f"written into {page}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds that each cell should have")
    parser.add_argument("--all", action="store_true", help="run until every cell has them, not one cell")
    parser.add_argument("--status", action="store_true", help="say what is done")
    parser.add_argument("--render", action="store_true", help="write docs/simulator.md")
    parser.add_argument("--model", action="append", choices=MODELS, help="only this model (repeatable)")
    parser.add_argument("--trace", action="append", choices=TRACES, help="only this trace (repeatable)")
    parser.add_argument("--load", action="append", type=float, help="only this load (repeatable)")
    parser.add_argument("--limit", type=int, default=300, help="requests of a run")
    parser.add_argument("--slo", default="ttft=4s,tpot=200ms", help="that the knee is found under")
    parser.add_argument("--profile-seconds", type=float, default=20.0)
    parser.add_argument("--any-load", action="store_true", help="do not wait until other processes are idle")
    parser.add_argument("--traces", type=Path, default=ROOT.parent / "shared" / "data" / "traces")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "benchmarks" / "results" / "simulator-accuracy.json"
    )
    args = parser.parse_args(arguments)
    results = Results(args.results)
    names = cells(args.model or PUBLISHED, args.trace or list(TRACES), args.load or LOADS)
    if args.status:
        for name in names:
            print(f"{name:32} {len(results.rounds(name))} of {args.rounds} rounds")
    elif args.render:
        render(results)
    else:
        while (cell := next_cell(results, names, args.rounds)) is not None:
            run_cell(args, results, cell)
            if not args.all:
                break


if __name__ == "__main__":
    main()
