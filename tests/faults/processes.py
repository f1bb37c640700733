"""The processes of a live server, by the names that `ps` shows, and signals to them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.e2e.live import LiveServer


def title_of(pid: int) -> str:
    """Return what ``ps`` shows as the command; empty for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode(errors="replace")
    except OSError:
        return ""


def children(server: LiveServer, title: str) -> list[int]:
    """Return the pids of the server's children with this title."""
    found = []
    for task in Path(f"/proc/{server.process.pid}/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            found += [int(pid) for pid in (task / "children").read_text().split()]
    return [pid for pid in found if title_of(pid) == title]


def engine_of(server: LiveServer) -> int:
    """Return the pid of the server's engine, which runs."""
    (pid,) = children(server, "quire: engine")
    return pid


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """SIGSTOP while the block runs; SIGCONT to those that still are there."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def wait_for(condition: Callable[[], bool], seconds: float = 60.0, interval_s: float = 0.01) -> float:
    """Wait until ``condition`` holds; return the seconds that it took."""
    begin_s = time.monotonic()
    while not condition():
        assert time.monotonic() - begin_s < seconds, "it did not happen in time"
        time.sleep(interval_s)
    return time.monotonic() - begin_s
