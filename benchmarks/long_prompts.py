"""First token of short requests beside a prompt of 8,000 tokens, and what the share costs: on and off in turns, live.

    python benchmarks/long_prompts.py MODEL [--tokens 8000] [--shorts 20] [--rounds 3] [--threshold N] [--serve "…"]

One server; `PATCH /runtime` sets ``long_prefill_token_threshold`` to N (the server's default) and to 0 in turns. Each
turn sends one long request, and beside it short ones of 30 tokens and 8 output tokens at the same times whatever the
setting, while the long one takes without the share. Prints the first token of short requests alone and beside, and
the tokens per second of each turn: prompt and output tokens of all requests, divided by the time until all have ended.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shlex
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

SHORT, SHORT_OUTPUT, LONG_OUTPUT = 30, 8, 16


class Turn(NamedTuple):
    """One long request and the short ones beside it."""

    ttft_s: list[float]
    long_ttft_s: float
    tokens_per_s: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=8000, help="of the long prompt")
    parser.add_argument("--shorts", type=int, default=20, help="short requests of a turn")
    parser.add_argument("--rounds", type=int, default=3, help="turns with the share, and as many without")
    parser.add_argument("--threshold", type=int, default=None, help="tokens [the server's default]")
    parser.add_argument("--serve", default="", help="more flags of quire serve")
    args = parser.parse_args()
    rng = random.Random(0)
    with server(args.model, *shlex.split(args.serve)) as (port, admin):
        threshold = args.threshold
        if threshold is None:
            threshold = call(admin, "/runtime")["runtime"]["long_prefill_token_threshold"]
        stream(port, prompt(rng, SHORT), SHORT_OUTPUT)
        turns: dict[int, list[Turn]] = {threshold: [], 0: []}
        alone: list[float] = []
        call(admin, "/runtime", {"long_prefill_token_threshold": 0})
        span_s = 0.95 * stream(port, prompt(rng, args.tokens), LONG_OUTPUT)[0]
        for number in range(args.rounds):
            alone += [stream(port, prompt(rng, SHORT), SHORT_OUTPUT)[0] for _ in range(5)]
            arrivals_s = sorted(rng.uniform(0.3, span_s) for _ in range(args.shorts))
            for value in (threshold, 0) if number % 2 == 0 else (0, threshold):
                call(admin, "/runtime", {"long_prefill_token_threshold": value})
                turns[value].append(turn(port, rng, args.tokens, arrivals_s))
    report(args, threshold, alone, turns)


def report(
    args: argparse.Namespace, threshold: int, alone: list[float], turns: dict[int, list[Turn]]
) -> None:
    """Print one JSON line per setting and one with the ratios."""
    alone_s = statistics.median(alone)
    print(json.dumps({"model": args.model, "cores": os.cpu_count(), "load": os.getloadavg()[0],
                      "alone_ms": round(alone_s * 1e3, 1)}))  # fmt: skip
    rates = {}
    for value, made in turns.items():
        beside = sorted(each for turn in made for each in turn.ttft_s)
        rates[value] = statistics.mean(turn.tokens_per_s for turn in made)
        line = {
            "threshold": value,
            "short_requests": len(beside),
            "ttft_ms_median": round(statistics.median(beside) * 1e3, 1),
            "ttft_ms_max": round(beside[-1] * 1e3, 1),
            "times_alone": round(statistics.median(beside) / alone_s, 2),
            "long_ttft_s": round(statistics.median(turn.long_ttft_s for turn in made), 2),
            "tokens_per_s": round(rates[value], 1),
        }
        print(json.dumps(line))
    print(json.dumps({"throughput_ratio": round(rates[threshold] / rates[0], 3)}))


def turn(port: int, rng: random.Random, num_tokens: int, arrivals_s: list[float]) -> Turn:
    """Send a long request and short ones at their times; wait for all."""
    prompts = [prompt(rng, SHORT) for _ in arrivals_s]
    start_s = time.perf_counter()

    def send_short(number: int) -> float:
        time.sleep(max(0.0, start_s + arrivals_s[number] - time.perf_counter()))
        return stream(port, prompts[number], SHORT_OUTPUT)[0]

    with ThreadPoolExecutor(len(prompts) + 1) as pool:
        long = pool.submit(stream, port, prompt(rng, num_tokens), LONG_OUTPUT)
        ttft_s = list(pool.map(send_short, range(len(prompts))))
        long_ttft_s, _ = long.result()
    took_s = time.perf_counter() - start_s
    total = num_tokens + LONG_OUTPUT + len(ttft_s) * (SHORT + SHORT_OUTPUT)
    return Turn(ttft_s, long_ttft_s, total / took_s)


def prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(100, 10_000) for _ in range(num_tokens)]


def stream(port: int, ids: list[int], max_tokens: int) -> tuple[float, int]:
    """Send one completion; return the seconds to its first token, and its chunks."""
    body = {"prompt": ids, "max_tokens": max_tokens, "stream": True, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    start_s, first_s, chunks = time.perf_counter(), 0.0, 0
    with urllib.request.urlopen(request, timeout=600) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                first_s = first_s or time.perf_counter() - start_s
                chunks += 1
    return first_s, chunks


def call(admin: int, path: str, body: dict[str, Any] | None = None) -> Any:
    """GET, or PATCH with a body, on the admin surface."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{admin}{path}",
        data,
        {"content-type": "application/json"},
        method="GET" if body is None else "PATCH",
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


@contextlib.contextmanager
def server(model: str, *flags: str) -> Iterator[tuple[int, int]]:
    """A server; gives its port and its admin port."""
    port, admin = free_port(), free_port()
    command = [
        sys.executable,
        "-m",
        "quire.cli",
        "serve",
        model,
        "--port",
        str(port),
        "--admin-port",
        str(admin),
    ]
    command += ["--max-model-len", "8192", "--no-prefix-caching", *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(3000):
            time.sleep(0.1)
            if process.poll() is not None:
                sys.exit(f"the server ended with status {process.returncode}: {shlex.join(command)}")
            with contextlib.suppress(urllib.error.URLError, OSError):
                if urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=1).status == 200:
                    break
        yield port, admin
    finally:
        process.terminate()
        process.wait(30)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


if __name__ == "__main__":
    main()
