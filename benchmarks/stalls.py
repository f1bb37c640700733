"""Latency of /livez beside hostile bodies and a burst of 2,000 requests: ``python -m benchmarks.stalls [--only NAME]``.

Starts ``quire serve quill`` and prints one row per attack: status, seconds until its answer, probes (p50, p99, max).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.e2e.live import LiveServer
from tests.faults.hostile import ATTACKS
from tests.faults.probe import Probe, send_raw

COMMAND = ["-m", "quire.cli", "serve", "quill", "--port", "0"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="names of attacks; 'burst' is the burst")
    parser.add_argument("--burst", type=int, default=2000)
    parser.add_argument("--path", default="/livez", help="/version is answered by the API process itself")
    args = parser.parse_args()
    names = args.only or [*ATTACKS, "burst"]
    print(
        f"{'attack':24} {'status':>8} {'answer s':>9} {'probes':>7} {'p50 ms':>8} {'p99 ms':>8} {'max ms':>9}"
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        LiveServer([*COMMAND, "--batch-dir", folder], Path(folder) / "log") as server,
    ):
        for name in names:
            path, kind, body = ATTACKS[name]() if name in ATTACKS else ("", "", b"")
            with Probe(server.url, args.path) as probe:
                time.sleep(0.2)
                begin_s = time.perf_counter()
                if name == "burst":
                    command = [sys.executable, "-m", "tests.faults.burst", server.url, str(args.burst)]
                    said = json.loads(subprocess.check_output(command))
                    status = " ".join(f"{k}:{v}" for k, v in said["statuses"].items())
                else:
                    status = str(send_raw(server.url, path, body, media_type=kind)[0])
                seconds = time.perf_counter() - begin_s
                time.sleep(0.2)
            p50, p99 = probe.quantile_ms(0.5), probe.quantile_ms(0.99)
            figures = f"{seconds:9.2f} {len(probe.latencies_ms):7} {p50:8.1f} {p99:8.1f} {probe.max_ms:9.1f}"
            print(
                f"{name:24} {status:>8} {figures}"
                + (f"  {len(probe.failed)} failed" if probe.failed else ""),
                flush=True,
            )


if __name__ == "__main__":
    main()
