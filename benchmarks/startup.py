"""`quire serve` from exec to the first token, CPU at rest, and memory: `python benchmarks/startup.py [MODEL] [FLAG …]`.

Flags that this script does not know go to `quire serve`. Ready is when the server says so. Memory is PSS of
/proc/PID/smaps_rollup, which counts shared pages once; the peak is the engine's VmHWM once it is ready.

``--cold`` asks the system to drop the model's files from its cache before each start.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from quire.errors import ConfigError
from quire.models.hub import locate
from quire_lab.bench.page import console, print_table, write
from quire_lab.bench.profile_serving import LiveServer

MIB = 2**20
TIMEOUT_S = 600.0


def startup(
    model: str,
    serve_flags: Sequence[str],
    *,
    rounds: int = 3,
    idle_s: float = 3.0,
    path: str | None = None,
    is_cold: bool = False,
) -> int:
    """Start and stop the server ``rounds`` times; print medians, and write them as JSON to ``path``.

    ``serve_flags`` go to `quire serve` as they are. CPU at rest is taken over ``idle_s`` seconds.
    """
    if not Path("/proc/self/smaps_rollup").exists():
        raise ConfigError("this benchmark reads /proc, which only Linux has")
    starts = []
    for _ in range(rounds):
        if is_cold:
            _forget(locate(model))
        starts.append(one_start(model, serve_flags, idle_s))
    medians = {key: median(r[key] for r in starts) for key in starts[0]}
    out = console()
    out.print(f"{model}: medians of {rounds} starts", highlight=False)
    print_table(out, ("", "median", "lowest", "highest"), [
        [key.replace("_", " "), value, min(r[key] for r in starts), max(r[key] for r in starts)]
        for key, value in medians.items()
    ])  # fmt: skip
    if path:
        write(path, json.dumps(medians | {"model": model, "rounds": starts}, indent=2) + "\n")
    return 0


def one_start(model: str, serve_flags: Sequence[str], idle_s: float) -> dict[str, float]:
    """Start the server once and return its figures; it is stopped on every way out."""
    begin_s = time.monotonic()
    with LiveServer([model, "--port", "0", *serve_flags], poll_s=0.01) as server:
        ready_s = time.monotonic() - begin_s
        peak_bytes = max(map(_peak_bytes, _children(server.pid)))  # the other children are small
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
            "engine_peak_mib": peak_bytes / MIB,
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


def _peak_bytes(pid: int) -> int:
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def _forget(model: Path) -> None:
    """Ask the system to drop the files of ``model``, a folder or one file, from its cache."""
    for path in filter(Path.is_file, model.iterdir() if model.is_dir() else [model]):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="quill")
    parser.add_argument("--rounds", type=int, default=3, help="starts")
    parser.add_argument(
        "--idle-s", type=float, default=3.0, help="seconds over which the CPU at rest is taken"
    )
    parser.add_argument("--cold", action="store_true", help="drop the model's files from the system's cache")
    parser.add_argument("--json", help="file for the figures")
    args, serve_flags = parser.parse_known_args()
    return startup(
        args.model, serve_flags, rounds=args.rounds, idle_s=args.idle_s, path=args.json, is_cold=args.cold
    )


if __name__ == "__main__":
    raise SystemExit(main())
