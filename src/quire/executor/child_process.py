"""What every process that an engine starts needs: its environment, its end with its parent, its lines on the terminal.

Only the standard library is imported, so that a child can be started before anything else is loaded.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import IO, Any

import quire

_PR_SET_PDEATHSIG = 1


def wake_at_parents_end() -> None:
    """Have the kernel continue this process when its parent ends, if it is stopped then: so it sees the end of file.

    Only Linux can do that. The signal also comes when the thread that started this process ends, and does no harm then.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def child_environment() -> dict[str, str]:
    """Return this process's environment, in which a child runs this very package, installed or not."""
    here = str(Path(quire.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))}


class PrefixedStream:
    """stderr with ``[name]`` before each line, so that several processes can share a terminal."""

    def __init__(self, stream: IO[str], name: str) -> None:
        self._stream = stream
        self._prefix = f"[{name}] "
        self._at_start = True

    def write(self, text: str) -> int:
        lines = "".join(
            [self._prefix + line if line.strip("\r\n") else line for line in text.splitlines(keepends=True)]
        )
        if not self._at_start:
            lines = lines.removeprefix(self._prefix)
        self._at_start = text.endswith(("\n", "\r")) if text else self._at_start
        return self._stream.write(lines)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
