"""`quire bench startup`: `quire serve` from its exec to the first token, CPU at rest, and memory.

Ready is when the server says so. Memory is PSS of /proc/PID/smaps_rollup, which counts shared pages once.
"""

from __future__ import annotations

import json
import os
import re
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from quire.bench.live_server import LiveServer
from quire.bench.offline_args import StartupArgs
from quire.bench.page import write
from quire.bench.table import console, print_table
from quire.errors import ConfigError

MIB = 2**20
TIMEOUT_S = 600.0


def startup(model: str, serve_flags: Sequence[str], args: StartupArgs) -> int:
    """Start and stop the server ``rounds`` times; print medians. ``serve_flags`` go to `quire serve` as they are."""
    if not Path("/proc/self/smaps_rollup").exists():
        raise ConfigError("quire bench startup reads /proc, which only Linux has")
    rounds = [one_start(model, serve_flags, args.idle_s) for _ in range(args.rounds)]
    medians = {key: median(r[key] for r in rounds) for key in rounds[0]}
    out = console()
    out.print(f"{model}: medians of {args.rounds} starts", highlight=False)
    print_table(out, ("", "median", "lowest", "highest"), [
        [key.replace("_", " "), value, min(r[key] for r in rounds), max(r[key] for r in rounds)]
        for key, value in medians.items()
    ])  # fmt: skip
    if args.json:
        write(args.json, json.dumps(medians | {"model": model, "rounds": rounds}, indent=2) + "\n")
    return 0


def one_start(model: str, serve_flags: Sequence[str], idle_s: float) -> dict[str, float]:
    """Start the server once and return its figures; it is stopped again whatever happens."""
    begin_s = time.monotonic()
    with LiveServer([model, "--port", "0", *serve_flags], poll_s=0.01) as server:
        ready_s = time.monotonic() - begin_s
        _one_token(server.url)
        first_token_s = time.monotonic() - begin_s
        pids = [server.pid, *_children(server.pid)]
        before_s = sum(map(_cpu_s, pids))
        time.sleep(idle_s)
        return {
            "ready_s": ready_s,
            "first_token_s": first_token_s,
            "idle_cpu_percent": 100 * (sum(map(_cpu_s, pids)) - before_s) / idle_s,
            "api_pss_mib": _pss_bytes(pids[0]) / MIB,
            "engine_pss_mib": sum(map(_pss_bytes, pids[1:])) / MIB,
        }


def _one_token(url: str) -> None:
    body: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 1, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        answer.read()


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _pss_bytes(pid: int) -> int:
    found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024
