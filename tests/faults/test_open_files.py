"""Limits of open files: told in one line at the start, raised to the hard limit, and survived while serving."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from tests.e2e.live import ROOT, LiveServer
from tests.faults.conftest import COMMAND, TINY

# Sets both limits, or the soft one alone, and becomes the server.
LIMITED = (
    "import os, resource, sys; n = int(sys.argv[1]); hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]; "
)
HARD = (
    LIMITED
    + "resource.setrlimit(resource.RLIMIT_NOFILE, (n, n)); os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
)
SOFT = (
    LIMITED
    + "resource.setrlimit(resource.RLIMIT_NOFILE, (n, hard)); os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
)


def test_too_few_files_are_one_line_at_the_start() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HARD, "100", *COMMAND],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode not in (0, -6, -11)
    assert "may open 100 files (ulimit -n)" in done.stderr
    assert len(done.stderr.splitlines()) <= 2, done.stderr


@pytest.mark.slow
def test_the_soft_limit_is_raised(tmp_path: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with LiveServer(["-c", SOFT, "150", *COMMAND], tmp_path / "log") as live:
        limits = Path(f"/proc/{live.process.pid}/limits").read_text()
        (line,) = [line for line in limits.splitlines() if line.startswith("Max open files")]
        assert int(line.split()[3]) in (hard, 2**20)


@pytest.mark.slow
def test_a_server_without_free_files_goes_on_serving(tmp_path: Path) -> None:
    with LiveServer(["-c", HARD, "150", *COMMAND], tmp_path / "log") as live:
        assert "at most 150 files may be open" in live.log.read_text()
        parts = urlsplit(live.url)
        with contextlib.ExitStack() as held, httpx.Client(base_url=live.url, timeout=60) as client:
            assert client.post("/v1/completions", json=TINY).status_code == 200
            for _ in range(200):
                sock = held.enter_context(socket.socket())
                sock.settimeout(5)
                with contextlib.suppress(OSError):
                    sock.connect((parts.hostname, parts.port))
            time.sleep(0.5)
            assert client.post("/v1/completions", json=TINY).status_code == 200, "over its own connection"
        deadline = time.monotonic() + 30
        status = 0
        while status != 200 and time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                status = httpx.post(live.url + "/v1/completions", json=TINY, timeout=30).status_code
        assert status == 200
        assert live.stop() == 0
        assert "Traceback" not in live.log.read_text()
