"""`EngineProcess`: the child process of an engine, started before anything heavy is imported here.

Starting it needs only the standard library, so a server starts it first and loads its own modules while the child loads
torch. Each side holds one end of a socket pair and sees the other's death as end of file: a killed parent leaves no
orphan, and no stream waits for a dead child.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from quire.executor.child_process import child_environment

# Files of the private directory, see `quire.engine.heartbeat` and `quire.engine.child`.
HEARTBEAT, STACKS, PLANS = "heartbeat", "stacks", "plans"
# The path of a Unix socket is limited to 107 bytes on Linux, so a long TMPDIR cannot be used.
_MAX_DIR_BYTES = 80


class EngineProcess:
    """A child that runs `quire.engine.child`. Its sockets are in a directory that only this user can enter."""

    def __init__(self, executor: str = "local") -> None:
        """Start the child. It imports what ``executor`` needs and waits for a configuration."""
        base = tempfile.gettempdir()
        self.directory = Path(
            tempfile.mkdtemp(prefix="quire-", dir=base if len(base.encode()) < _MAX_DIR_BYTES else "/tmp")
        )
        try:
            self._start(executor)
        except OSError:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise

    def _start(self, executor: str) -> None:
        self.life, theirs = socket.socketpair()  # readable once the child is dead
        with theirs:
            arguments = [str(theirs.fileno()), str(self.directory), executor]
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "quire.engine.child", *arguments],
                stdin=subprocess.DEVNULL,
                # A library's prints in the child must not mix with this process's output.
                stdout=2,
                pass_fds=[theirs.fileno()],
                env=child_environment(),
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    def fate(self) -> str:
        """Wait for the child, which is about to end, and return how it ended, in words."""
        try:
            status = self._popen.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if status < 0:
            name = signal.Signals(-status).name
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            return f"was killed by {name}{hint}"
        return f"exited with status {status}"

    def state(self) -> str:
        """Return the kernel's letter for what the child does: R runs, S sleeps, D waits for a device, T is stopped."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "?"

    def dump(self, *, is_last: bool = False, wait_s: float = 0.5) -> str:
        """Ask the child, which is loaded, for its plans and its stacks; return what it has written by then.

        ``is_last``: it is killed next, so its stacks are read by a signal that works whatever the child does, and
        that may crash it.
        """
        (self.directory / PLANS).unlink(missing_ok=True)
        if is_last:
            self._popen.send_signal(signal.SIGUSR1)
        with contextlib.suppress(OSError):  # it is dead already
            self.life.send(b"d", socket.MSG_DONTWAIT)
        time.sleep(wait_s)
        texts = []
        for name in (PLANS, STACKS):
            with contextlib.suppress(OSError):
                texts.append((self.directory / name).read_text(errors="replace"))
        return "\n".join(filter(None, texts))

    def close(self, grace_s: float = 5.0) -> None:
        """End the child (it exits when its connection closes; it is killed after ``grace_s``) and clean up."""
        self.life.close()
        try:
            self._popen.wait(timeout=grace_s)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        shutil.rmtree(self.directory, ignore_errors=True)
