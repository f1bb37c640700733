"""`LiveServer`: a `quire serve` of one's own on a free port, for the time of a ``with`` block."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Self

from quire.errors import ConfigError

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0
_READY = re.compile(r"^ready\b.* on (http://\S+)$", re.MULTILINE)


class LiveServer:
    """Starts on entry, waits until the server says that it is ready, and is ended by its own pid on exit."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        command: Sequence[str] = ("-m", "quire.cli", "serve"),
        poll_s: float = 0.05,
    ) -> None:
        """``arguments``: model and flags of ``quire serve``; ``command`` replaces it (a test's server)."""
        self._poll_s = poll_s
        self._command = [sys.executable, *command, *arguments]
        self._log = tempfile.TemporaryFile("w+b")  # noqa: SIM115 (closed on exit)
        self.url = ""

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT
        )
        try:
            self.url = self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()

    def _wait(self) -> str:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            said = self._said()
            if found := _READY.search(said):
                return found[1]
            if self._process.poll() is not None:
                last = said.strip().splitlines()[-1:] or ["without a word"]
                raise ConfigError(f"the server ended while it started: {last[0]}")
            time.sleep(self._poll_s)
        raise ConfigError(f"the server was not ready after {START_TIMEOUT_S:.0f} s: {self._said()[-500:]}")

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")
