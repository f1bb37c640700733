"""Quire beside its peers on CPU, on the same random-weight checkpoints: interleaved rounds, resumable.

    make bench-peers ARGS="--models llama-1b --workloads AB --rounds 3"
    python benchmarks/peers/bench.py run --models smol-135m --engines quire,llama.cpp --precisions int4
    python benchmarks/peers/bench.py table

`install.py` makes the peers' environments and `convert.py` the checkpoints; both before the first run. A *visit*
starts one engine on one checkpoint and runs the workloads asked for; each gives one *cell* of the results file, which
is written at once. Cells that are there are not run again (`--again` does) but where the probes show that something
else ran beside them; so a run that was cut goes on where it stopped, and runs of several days merge. Rounds are the
outermost loop: engines take turns. `--wrap` puts a command in front of each visit, such as a lock that keeps others
away.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

from environment import FORCED, HERE, ROOT, Environment, machine_name, machine_words
from results import Cell, Results, key, median
from table import ENGINES, PRECISIONS, render
from workloads import D_MEAN_LENGTH, NAMES

from quire import _native

PROBE_BYTES = 2 << 30
D_LOAD = 1.3  # of the best peer's throughput in B


def probe() -> dict[str, Any]:
    """Return what the machine gives now: bytes a second, and operations a second of each dot instruction."""
    threads = len(os.sched_getaffinity(0))
    return {
        "read": PROBE_BYTES / _native.probe_read(threads, PROBE_BYTES, 3),
        "dots": {name: _native.probe_dot(threads, name, 3) for name in _native.dot_probes()},
    }


def run_adapter(command: list[str], environ: dict[str, str], timeout: float) -> tuple[str, str | None]:
    """Return the adapter's standard output, and why it failed. It has a session of its own: its tools end with it."""
    with subprocess.Popen(
        command, env=environ, cwd=HERE, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            out, errors = process.communicate(timeout=timeout)
            failed = (errors.strip().splitlines() or [""])[-1][:300] if process.returncode else None
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, _ = process.communicate()
            failed = f"not finished in {timeout:.0f} s"
        finally:
            if process.poll() is None:  # this program was told to end
                os.killpg(process.pid, signal.SIGKILL)
    return out, failed


def visit(given: argparse.Namespace) -> None:
    """Probe, run the adapter, probe again; print a line for each cell, and one for a failure."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    before = probe()
    out, failed = run_adapter(given.command, os.environ | given.environ, given.timeout)
    lines = out.splitlines()
    after = probe()
    cells = [json.loads(line.removeprefix("CELL ")) for line in lines if line.startswith("CELL ")]
    missing = [w for w in given.workloads if w not in {cell["workload"] for cell in cells}]
    cells += [{"workload": name, "failed": failed or "no result"} for name in missing]
    for cell in cells:
        print("CELL " + json.dumps(cell | {"before": before, "after": after}), flush=True)


def rate_of(results: Results, where: dict[str, Any]) -> float | None:
    """Return D's requests a second: 1.3 × the best peer's B, or None while no peer has run B."""
    rates = [median(results.select(workload="B", engine=e, **where), "B") for e in ENGINES if e != "quire"]
    known = [rate for rate in rates if rate is not None]
    return D_LOAD * max(known) / D_MEAN_LENGTH if known else None


def settled(results: Results, cell: Cell) -> bool:
    """Whether a cell is there, and was measured while nothing else ran."""
    found = results.cells.get(key(cell))
    return found is not None and results.steady(found)


def run_visit(environment: Environment, given: argparse.Namespace, results: Results, cell: Cell) -> None:
    """Run what is missing of one (model, precision, isa, engine, round)."""
    asked = [w for w in given.workloads if environment.can(cell["engine"], w)]
    wanted = [w for w in asked if given.again or not settled(results, cell | {"workload": w})]
    where = {name: cell[name] for name in ("model", "precision", "isa", "ranks")}
    rate = rate_of(results, where) if "D" in wanted else 0.0
    if rate is None:
        wanted.remove("D")
    plan = environment.adapter(cell["engine"], cell["model"], cell["precision"], cell["isa"], cell["ranks"])
    if plan is None or not wanted:
        return
    arguments = ["--workloads", "".join(wanted), "--round", str(cell["round"]), "--rate", str(rate or 0.0)]
    inner = {"command": [*plan.command, *arguments], "environ": plan.environ}
    command = [*shlex.split(given.wrap), sys.executable, str(HERE / "bench.py"), "visit", json.dumps(inner)]
    command += ["--workloads", "".join(wanted), "--timeout", str(given.timeout)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line.removeprefix("CELL ") for line in done.stdout.splitlines() if line.startswith("CELL ")]
    assert lines, done.stderr
    version = commit() if cell["engine"] == "quire" else environment.versions.get(cell["engine"], "")
    stamp = {"date": date.today().isoformat(), "version": version}
    cells = [cell | stamp | json.loads(line) for line in lines]
    results.add(cells)
    for made in cells:
        shown = made.get("failed") or [round(s, 2) for s in made["total_s"]]
        words = [str(made[k]) for k in ("round", "model", "precision", "isa", "engine", "workload")]
        print(*words, shown, f"read {made['before']['read'] / 1e9:.1f} GB/s", flush=True)


def commit() -> str:
    """Return the last commit of this tree that changed the engine, with "-dirty" if more has changed since."""
    git, code = ["git", "-C", str(ROOT)], ["--", "src", "csrc"]
    last = subprocess.run(
        [*git, "log", "-1", "--format=%h", *code], capture_output=True, text=True, check=False
    )
    clean = subprocess.run([*git, "diff", "--quiet", "HEAD", *code], check=False).returncode == 0
    return last.stdout.strip() + ("" if clean else "-dirty")


def run(given: argparse.Namespace) -> None:
    environment, results = Environment(given.home, given.checkpoints), Results(given.results)
    for round_ in range(given.first_round, given.first_round + given.rounds):
        for model in given.models:
            for precision in given.precisions:
                for engine in given.engines:
                    cell = {"model": model, "precision": precision, "isa": given.isa, "engine": engine}
                    cell["ranks"] = given.ranks
                    run_visit(environment, given, results, cell | {"round": round_})
    write_table(given)


def write_table(given: argparse.Namespace) -> None:
    results = Results(given.results)
    environment = Environment(given.home, given.checkpoints)
    versions = ", ".join(f"{name} {version}" for name, version in environment.versions.items())
    outdated = results.outdated(given.since)
    for cell in outdated:
        del results.cells[key(cell)]
    dates = sorted({cell["date"] for cell in results.select()})
    head = f"# Quire beside its peers: {machine_words()}, {' … '.join(dict.fromkeys((dates[0], dates[-1])))}"
    head += f"\n\nVersions: {versions}.\nWritten by `benchmarks/peers/bench.py table"
    head += f"{f' --since {given.since}' if given.since else ''}` from `{given.results.name}`."
    if outdated:
        ours = sorted(
            {
                c["version"] or "commit not noted"
                for c in results.select(engine="quire")
                if c["round"] >= given.since
            }
        )
        head += f"\nQuire's figures are of rounds {given.since} and later where a column has such: {', '.join(ours)}."
    given.results.with_suffix(".md").write_text(render(results, given.checkpoints, head))
    print(given.results.with_suffix(".md"))


def comma(text: str) -> list[str]:
    return text.split(",")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["run", "table", "visit"])
    parser.add_argument("inner", nargs="?", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--models", type=comma, default=["llama-1b"], help="llama-1b, qwen3-0.6b, smol-135m")
    parser.add_argument("--precisions", type=comma, default=list(PRECISIONS))
    parser.add_argument("--engines", type=comma, default=list(ENGINES))
    parser.add_argument("--workloads", default="AB", help=f"letters of {''.join(NAMES)}")
    parser.add_argument(
        "--isa",
        default="native",
        choices=["native", *FORCED],
        help="a forced level; avx2: Quire and llama.cpp alone; avx512_vnni: vLLM too, as far as oneDNN computes",
    )
    parser.add_argument("--ranks", type=int, default=1, help="tensor-parallel ranks: Quire and vLLM")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--first-round", type=int, default=0)
    parser.add_argument(
        "--since", type=int, default=0, help="the table leaves Quire's rounds before this one out: older code"
    )
    parser.add_argument("--again", action="store_true", help="measure cells that are there once more")
    parser.add_argument("--timeout", type=float, default=240, help="seconds a visit may take")
    parser.add_argument("--wrap", default="", help="command in front of each visit")
    parser.add_argument(
        "--home", type=Path, default=Path("/tmp/peers"), help="environments, converted models"
    )
    parser.add_argument("--checkpoints", type=Path, default=Path("/tmp/models"))
    results = ROOT / f"benchmarks/results/cpu-{machine_name()}.jsonl"
    parser.add_argument("--results", type=Path, default=results)
    given = parser.parse_args()
    if given.what == "visit":
        given.command, given.environ = given.inner["command"], given.inner["environ"]
    {"run": run, "table": write_table, "visit": visit}[given.what](given)


if __name__ == "__main__":
    main()
