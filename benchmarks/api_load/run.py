"""The API process under load, on one core, against a scripted engine (issue "The API", Speed).

    python -m benchmarks.api_load.run --tokens-per-s 10000 20000 40000
    python -m benchmarks.api_load.run --short

The API process has one core; the load generator and the scripted engine share the other. Printed as JSON, a line a
load: streamed tokens/s as the engine gave them while the client counted, chunks/s as they came, the delay of a token
from the engine's send to the client's read, or short requests/s that are not streamed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.api_load.client import PROBES, Tally, run_load


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def delays(tally: Tally, log: dict[str, Any]) -> list[float]:
    """Seconds from the engine's send of a token to the client's read of it, for the probes' tokens."""
    first, times = log["first_step"], log["step_times"]
    found = []
    for answer, index, when in tally.arrivals:
        step = first[answer] + index - 1
        found.append(when - times[step])
    return found


def one(given: argparse.Namespace, tokens_per_s: float, streams: bool) -> dict[str, Any]:
    directory = tempfile.mkdtemp(prefix="quire-load-")
    server = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.api_load.server", given.model, "0", "1", str(tokens_per_s), directory],
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        connections = given.streams if streams else given.connections
        tally, seconds, late = run_load(
            url,
            connections=connections,
            streams=streams,
            num_tokens=given.tokens if streams else given.short_tokens,
            warm_s=given.warm_s,
            count_s=given.seconds,
        )
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=30)
    log = json.loads(Path(directory, "log.json").read_text())
    shutil.rmtree(directory, ignore_errors=True)
    if not streams:
        return {"short_requests_per_s": round(tally.num_answers / seconds), "tokens_each": given.short_tokens,
                "connections": connections, "wrong": tally.num_wrong}  # fmt: skip
    waited = delays(tally, log)
    probed = sum(1 for _ in tally.arrivals) / PROBES  # tokens of a stream
    return {
        "asked_tokens_per_s": tokens_per_s,
        "streams": connections,
        "tokens_per_s": round(probed * connections / seconds),
        "chunks_per_s": round(tally.num_chunks / seconds),
        "answers": tally.num_answers,
        "wrong": tally.num_wrong,
        "delay_p50_ms": round(percentile(waited, 0.5) * 1e3, 1),
        "delay_p99_ms": round(percentile(waited, 0.99) * 1e3, 1),
        "client_late_p99_ms": round(percentile(late, 0.99) * 1e3, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="quill", help="whose tokenizer and chat template are used")
    parser.add_argument("--tokens-per-s", type=float, nargs="*", default=[10_000.0, 20_000.0, 30_000.0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400, help="of a streamed answer")
    parser.add_argument("--short", action="store_true", help="requests that are not streamed instead")
    parser.add_argument("--short-tokens", type=int, default=4)
    parser.add_argument("--connections", type=int, default=64, help="of the short requests")
    parser.add_argument("--warm-s", type=float, default=3.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    given = parser.parse_args()
    os.sched_setaffinity(0, {1})
    if given.short:
        print(json.dumps(one(given, 1e9, False)), flush=True)
        return
    for tokens_per_s in given.tokens_per_s:
        print(json.dumps(one(given, tokens_per_s, True)), flush=True)


if __name__ == "__main__":
    main()
