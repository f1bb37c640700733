"""llama.cpp through its own tools: llama-bench for A, llama-batched-bench for B, llama-server for C and D.

llama-bench and llama-batched-bench have no sampler, no scheduler and no server around the model: A and B are the most
that llama.cpp could give. Options: ``{"bin": "folder of the tools"}``.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import arguments, timed
from workloads import Item, make, warm_up

THREADS = str(len(os.sched_getaffinity(0)))


def rows(command: list[str]) -> list[dict[str, Any]]:
    """Run a tool that prints JSON lines."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        sys.exit(f"{Path(command[0]).name} ended with {done.returncode}: {last}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def single(tools: Path, model: Path) -> dict[str, Any]:
    base = [str(tools / "llama-bench"), "-m", str(model), "-t", THREADS, "-r", "2", "-o", "jsonl"]
    (prefill,) = rows([*base, "-p", "512", "-n", "0"])
    (decode,) = rows([*base, "-p", "0", "-n", "127", "-d", "512"])
    prefill_s = [ns / 1e9 for ns in prefill["samples_ns"]]
    decode_s = [ns / 1e9 for ns in decode["samples_ns"]]
    total_s = [p + d for p, d in zip(prefill_s, decode_s, strict=True)]
    return {"workload": "A", "prefill_s": prefill_s, "total_s": total_s}


def batched(tools: Path, model: Path) -> dict[str, Any]:
    (row,) = rows(
        [str(tools / "llama-batched-bench"), "-m", str(model), "-t", THREADS, "-tb", THREADS, "-c", "16384",
         "-b", "2048", "-ub", "512", "-npp", "128", "-ntg", "128", "-npl", "32", "--output-format", "jsonl"]
    )  # fmt: skip
    return {"workload": "B", "total_s": [row["t"]], "output_tokens": 32 * 128}


class Server:
    """llama-server with 32 slots over one KV cache; requests go over HTTP, one thread each."""

    def __init__(self, tools: Path, model: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [str(tools / "llama-server"), "-m", str(model), "-t", THREADS, "-np", "32", "-c", "40960",
                   "--host", "127.0.0.1", "--port", str(port)]  # fmt: skip
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not self.healthy():
            assert self.process.poll() is None, f"llama-server ended with {self.process.returncode}"
            time.sleep(0.1)

    def healthy(self) -> bool:
        try:
            return bool(urllib.request.urlopen(self.url + "/health", timeout=1).status == 200)
        except OSError:
            return False

    def complete(self, item: Item) -> int:
        body = {"prompt": item.prompt, "n_predict": item.output, "temperature": 0, "ignore_eos": True,
                "cache_prompt": True}  # fmt: skip
        request = urllib.request.Request(
            self.url + "/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        return int(json.load(urllib.request.urlopen(request, timeout=600))["tokens_predicted"])

    def replay(self, items: Sequence[Item]) -> list[int]:
        counts, begin = [0] * len(items), time.perf_counter()

        def go(index: int, item: Item) -> None:
            time.sleep(max(0.0, item.arrival_s - (time.perf_counter() - begin)))
            counts[index] = self.complete(item)

        threads = [threading.Thread(target=go, args=pair) for pair in enumerate(items)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return counts

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()


def show(cell: dict[str, Any]) -> None:
    print("CELL " + json.dumps(cell), flush=True)


def main() -> None:
    given = arguments()
    tools = Path(given.options["bin"])
    if "A" in given.workloads:
        show(single(tools, given.model))
    if "B" in given.workloads:
        show(batched(tools, given.model))
    served = [name for name in given.workloads if name in "CD"]
    if served:
        server = Server(tools, given.model)
        try:
            server.replay(warm_up())
            for name in served:
                items = make(name, given.round, given.rate)
                seconds = timed(server.replay, items)
                output_tokens = sum(item.output for item in items)
                cell = {"workload": name, "total_s": [seconds], "output_tokens": output_tokens}
                show(cell | {"rate": given.rate})
        finally:
            server.close()


if __name__ == "__main__":
    main()
