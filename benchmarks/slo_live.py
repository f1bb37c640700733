"""``quire serve --slo`` live on Quill against static chunk budgets: long prompts mixed with decodes, two servers.

    python benchmarks/slo_live.py [--rate 20] [--slo ttft=2s,tpot=6ms] [--budgets 128,512,2048] [--seconds 4]

Static budgets are set live through the admin surface of one server. Prints p95 TPOT, p95 TTFT and goodput of each run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

QUIRE = [sys.executable, "-m", "quire.cli"]
DEFAULT_BUDGET = 2048


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def server(*flags: str) -> Iterator[tuple[int, int]]:
    """A server of Quill; gives its port and its admin port."""
    port, admin = free_port(), free_port()
    command = [
        *QUIRE,
        "serve",
        "quill",
        "--port",
        str(port),
        "--admin-port",
        str(admin),
        "--no-prefix-caching",
        *flags,
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            time.sleep(0.1)
            with contextlib.suppress(urllib.error.URLError, OSError):
                if urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=1).status == 200:
                    break
        yield port, admin
    finally:
        process.terminate()
        process.wait(30)


def set_budget(admin: int, budget: int) -> None:
    body = json.dumps({"max_num_batched_tokens": budget}).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{admin}/runtime", body, headers, method="PATCH")
    urllib.request.urlopen(request, timeout=5).read()


def load(port: int, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One run of the load generator."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "summary.json"
        command = [
            *QUIRE, "bench", "serve", "--url", f"http://127.0.0.1:{port}", "--input-len", args.input_len,
            "--output-len", args.output_len, "--rate", str(args.rate), "--limit", str(round(args.rate * args.seconds)),
            "--slo", args.slo, "--seed", str(seed), "--max-model-len", "8192", "--json", str(out),
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--slo", default="ttft=2s,tpot=6ms")
    parser.add_argument("--budgets", default="128,512,2048")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--input-len", default="lognormal:600,1.0,6000")
    parser.add_argument("--output-len", default="uniform:32,128")
    args = parser.parse_args()
    print(f"Quill, {args.rate:g}/s, prompts {args.input_len}, outputs {args.output_len}, {args.slo}\n")
    print("| budget | p95 TPOT ms | p95 TTFT ms | goodput/s | output tokens/s |\n|---|---|---|---|---|")
    with server() as (plain, admin), server("--slo", args.slo) as (held, _):
        for seed in range(args.rounds):
            for budget in (*map(int, args.budgets.split(",")), None):
                if budget is not None:
                    set_budget(admin, budget)
                s = load(held if budget is None else plain, args, seed)
                cells = (str(budget or "--slo"), f"{s['tpot_ms']['p95']:.2f}", f"{s['ttft_ms']['p95']:.0f}",
                         f"{s['goodput_per_s']:.2f}", f"{s['output_tokens_per_s']:.0f}")  # fmt: skip
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
