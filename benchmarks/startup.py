"""Seconds to ready, CPU at rest, and memory of `quire serve` (issue "Quire serves", speed and memory).

    python benchmarks/startup.py quill --rounds 3
    python benchmarks/startup.py /tmp/models/llama-1b --kv-memory 4GiB

Ready is from the exec of the command to 200 on /readyz. Memory is PSS from /proc/PID/smaps_rollup; of the engine also
less its weights and the KV memory that it touched (nothing, before the first request).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

MIB = 2**20
TICKS = os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=1) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def pss_bytes(pid: int) -> int:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def one_round(given: argparse.Namespace) -> dict[str, float]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "quire.cli", "serve", given.model, "--port", str(port)]
    if given.kv_memory:
        command += ["--kv-memory", given.kv_memory]
    begin = time.monotonic()
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        while not is_ready(url):
            assert server.poll() is None, server.stderr.read() if server.stderr else ""
            time.sleep(0.01)
        ready_s = time.monotonic() - begin
        (engine,) = children(server.pid)
        before = cpu_s(server.pid) + cpu_s(engine)
        time.sleep(given.idle)
        busy = (cpu_s(server.pid) + cpu_s(engine) - before) / given.idle
        return {
            "ready_s": ready_s,
            "idle_cpu_percent": 100 * busy,
            "engine_pss_mib": pss_bytes(engine) / MIB,
            "api_pss_mib": pss_bytes(server.pid) / MIB,
        }
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=30)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="quill")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--idle", type=float, default=10.0, help="seconds over which CPU at rest is taken")
    parser.add_argument("--kv-memory", default=None)
    given = parser.parse_args()
    rounds = [one_round(given) for _ in range(given.rounds)]
    median = {key: round(statistics.median(r[key] for r in rounds), 3) for key in rounds[0]}
    print(
        json.dumps(
            {"benchmark": "startup", "model": Path(given.model).name, "rounds": given.rounds, **median}
        )
    )


if __name__ == "__main__":
    main()
