"""Live servers for the end-to-end tests: a process on a free port of 127.0.0.1, always ended by its own pid."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 240
STOP_TIMEOUT_S = 120
_ADMIN = re.compile(r"^admin +on (\S+)$", re.MULTILINE)
_READY = r"server ready url=(\S+)"


class LiveServer:
    """A server process and its base URL. Use as a context manager."""

    def __init__(
        self,
        command: list[str],
        log: Path,
        env: Mapping[str, str] | None = None,
        ready: str = _READY,
        start_s: float = START_TIMEOUT_S,
    ) -> None:
        """``ready``: the pattern of the log that holds the URL."""
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        self.log = log
        self._ready, self._start_s = ready, start_s
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(env or {})},
            )
        try:
            self.url = self.direct_url = (
                self._wait()
            )  # a test may put something in front, which changes ``url``
        except BaseException:
            self.stop()
            raise

    def _wait(self) -> str:
        deadline = time.monotonic() + self._start_s
        while time.monotonic() < deadline:
            found = re.search(self._ready, self.log.read_text(errors="replace"))
            if found:
                return found[1]
            assert self.process.poll() is None, self.log.read_text(errors="replace")
            time.sleep(0.05)
        raise TimeoutError(f"not ready after {self._start_s} s: {self.log.read_text(errors='replace')}")

    def stop(self) -> int:
        """SIGTERM, and SIGKILL where that does not help; return the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()

    @property
    def admin_url(self) -> str:
        """Of the admin surface, where there is one."""
        found = _ADMIN.search(self.log.read_text(errors="replace"))
        assert found, "the server has no admin surface"
        return found[1]

    def metric(self, name: str) -> float:
        """The value of an unlabelled metric of /metrics (beside the model's own labels)."""
        text = httpx.get(self.direct_url + "/metrics").text
        found = re.search(rf"^{re.escape(name)}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
        assert found, name
        return float(found[1])

    def __enter__(self) -> LiveServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
