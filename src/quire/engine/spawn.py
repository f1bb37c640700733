"""`EngineProcess`: the child process of an engine, started before anything heavy is imported here.

Starting it needs only the standard library, so a server starts it first and loads its own modules while the child loads
torch. Each side holds one end of a socket pair and sees the other's death as end of file: a killed parent leaves no
orphan, and no stream waits for a dead child.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import quire

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
        self.life, theirs = socket.socketpair()  # readable once the child is dead
        with theirs:
            arguments = [str(theirs.fileno()), str(self.directory), executor]
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "quire.engine.child", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=2,  # a library's prints in the child must not mix with this process's output
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

    def close(self) -> None:
        """End the child (it exits when its connection closes; it is killed if it does not) and clean up."""
        self.life.close()
        try:
            self._popen.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


def child_environment() -> dict[str, str]:
    """Return this process's environment, in which a child runs this very package, installed or not."""
    here = str(Path(quire.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))}
