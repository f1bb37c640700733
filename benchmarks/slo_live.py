"""``quire serve --slo`` live on Quill against eight static chunk budgets: long prompts mixed with decodes, two servers.

    python benchmarks/slo_live.py [--slo ttft=3s,tpot=15ms] [--rate X] [--seconds 12] [--rounds 2] [--profile FILE]

The rate is 0.9 of the knee: the highest at which one of three middling budgets serves 95 % of the requests within the
SLO, by the simulator and a profile made at the start (``--rate`` says another one). Static budgets are set live through
the admin surface of one server; rounds are interleaved over budgets. Prints p95 TPOT, p95 TTFT and goodput of each run,
then the means: does p95 TPOT hold where the default breaks it, and what is goodput beside the best budget's?
The engine has one thread, which leaves the load generator a CPU (see simulator_accuracy.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.slo import Slo

QUIRE = [sys.executable, "-m", "quire.cli"]
DEFAULT_BUDGET = 2048
BUDGETS = (32, 64, 96, 128, 256, 512, 1024, DEFAULT_BUDGET)
MIDDLING = (128, 256, 512)
KNEE_S = (
    40.0  # simulated at each rate: a queue that grows without end takes that long to miss a TTFT of seconds
)
ENGINE = ("quill", "--threads", "1", "--no-prefix-caching")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def server(*flags: str) -> Iterator[tuple[int, int]]:
    """A server of Quill; gives its port and its admin port."""
    port, admin = free_port(), free_port()
    command = [*QUIRE, "serve", *ENGINE, "--port", str(port), "--admin-port", str(admin), *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(3000):
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
            *QUIRE, "bench", "serve", "--url", f"http://127.0.0.1:{port}", *work(args, args.rate, args.seconds),
            "--seed", str(seed), "--json", str(out),
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def work(args: argparse.Namespace, rate: float, seconds: float) -> list[str]:
    """The flags that say what is asked, of the load generator and of the simulator."""
    return [
        "--input-len", args.input_len, "--output-len", args.output_len, "--rate", f"{rate:.4g}",
        "--limit", str(round(rate * seconds)), "--slo", args.slo, "--max-model-len", "8192",
    ]  # fmt: skip


def knee(args: argparse.Namespace, profile: Path) -> float:
    """The highest rate (to 5 %) at which one of the middling budgets serves 95 % within the SLO, simulated."""

    def share(rate: float, budget: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "summary.json"
            command = [*QUIRE, "simulate", "--profile", str(profile), *work(args, rate, KNEE_S), "--no-prefix-caching",
                       "--max-num-batched-tokens", str(budget), "--json", str(out)]  # fmt: skip
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            found = json.loads(out.read_text())
            return float(found["num_good"] / found["num_requests"])

    low, high = 1.0, 64.0
    while high / low > 1.05:
        rate = (low * high) ** 0.5
        met = any(share(rate, budget) >= 0.95 for budget in MIDDLING)
        low, high = (rate, high) if met else (low, rate)
    return low


def settle_rate(args: argparse.Namespace, folder: Path) -> Path:
    """Return the profile, made if none is given, and set ``args.rate`` where it is not."""
    profile = args.profile or folder / "quill.json"
    if not profile.exists():
        command = [*QUIRE, "profile", *ENGINE, "--seconds", "30", "--out", str(profile)]
        subprocess.run(command, check=True)
    args.rate = args.rate or 0.9 * knee(args, profile)
    return Path(profile)


def verdict(runs: dict[str, list[dict[str, Any]]], slo: str) -> str:
    """The means over the rounds, and the two questions of the issue."""
    limit_ms = (Slo.parse(slo).tpot_s or math.inf) * 1e3
    tpot = {name: statistics.fmean(s["tpot_ms"]["p95"] for s in found) for name, found in runs.items()}
    good = {name: statistics.fmean(s["goodput_per_s"] for s in found) for name, found in runs.items()}
    best = max((name for name in runs if name != "--slo"), key=lambda name: good[name])
    default = str(DEFAULT_BUDGET)
    return (
        f"p95 TPOT: --slo {tpot['--slo']:.1f} ms, default {tpot[default]:.1f} ms, limit {limit_ms:g} ms; "
        f"goodput: --slo {good['--slo']:.2f}/s, best static ({best}) {good[best]:.2f}/s, "
        f"ratio {good['--slo'] / good[best]:.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rate", type=float, help="requests/s; else 0.9 of the knee")
    parser.add_argument("--slo", default="ttft=3s,tpot=15ms")
    parser.add_argument("--budgets", default=",".join(map(str, BUDGETS)))
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--profile", type=Path, help="of this engine with one thread; made if it does not exist"
    )
    parser.add_argument("--input-len", default="lognormal:600,1.0,6000")
    parser.add_argument("--output-len", default="uniform:32,128")
    args = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        profile = settle_rate(args, Path(folder))
        print(f"Quill, {args.rate:.3g}/s, prompts {args.input_len}, outputs {args.output_len}, {args.slo}\n")
        print("| budget | p95 TPOT ms | p95 TTFT ms | goodput/s | output tokens/s |\n|---|---|---|---|---|")
        controlled = ("--slo", args.slo, "--profile", str(profile))
        with server() as (plain, admin), server(*controlled) as (held, _):
            for seed in range(args.rounds):
                for budget in (*map(int, args.budgets.split(",")), None):
                    if budget is not None:
                        set_budget(admin, budget)
                    s = load(held if budget is None else plain, args, seed)
                    name = str(budget or "--slo")
                    runs.setdefault(name, []).append(s)
                    cells = (name, f"{s['tpot_ms']['p95']:.2f}", f"{s['ttft_ms']['p95']:.0f}",
                             f"{s['goodput_per_s']:.2f}", f"{s['output_tokens_per_s']:.0f}")  # fmt: skip
                    print(f"| {' | '.join(cells)} |", flush=True)
    print(f"\n{verdict(runs, args.slo)}")


if __name__ == "__main__":
    main()
