"""What `make install` does, told as it happens: downloads, "compile 12 of 103", and how long each takes.

    python3 tools/install.py VENV LOG -- ARGUMENTS OF pip install … [-- ARGUMENTS OF ANOTHER …]

The installs run side by side, so no two may bring the same package. pip's own output goes to the file LOG; where an
install fails, the end of its part is shown. Nothing but the standard library is used, as nothing is installed yet.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TextIO

# Measured on two quiet cores of an Intel Granite Rapids (benchmarks/results/first-hour.md).
COMPILE_CORE_MINUTES = 3.6
DOWNLOAD_MB = 290  # torch's CPU build, the other packages, and what the build needs
SHOWN_LINES = 25  # of pip's output, where it fails
EVERY_S = 5.0  # between two lines of a step, where the output is no terminal
_OBJECT = re.compile(r"^\s*\[(\d+)/(\d+)\] ")
_FETCHED = re.compile(
    r"^\s*(?:Downloading|Processing) (?:\S*/)?([A-Za-z0-9_.]+)-\d\S*(?: \(([\d.]+ [kMG]B)\))?"
)
# pip compiles none of the 19,000 modules that it brings. These are what `quire serve` needs, and what they import.
LOADED = "quire.cli.serve, quire.api.app, quire.engine.core, quire.executor.local, quire.runner.worker"
_PHASES = (
    (re.compile(r"Installing build dependencies"), "fetching what the build needs"),
    (re.compile(r"Building (?:editable|wheel) for "), "configuring the build of the kernels"),
    (re.compile(r"Installing collected packages"), "unpacking what was downloaded"),
)


class Progress:
    """Lines on a terminal, the last one rewritten as it goes on; elsewhere one every few seconds."""

    def __init__(self, out: TextIO, now: Callable[[], float]) -> None:
        self._out, self._now = out, now
        self._is_terminal = out.isatty()
        self._start_s = now()
        self._last_s = -EVERY_S
        self._text = ""

    def say(self, text: str, *, is_new: bool = False, is_last: bool = False) -> None:
        """Show the state of a step; ``is_new``: of another step, which is shown at once."""
        minutes, seconds = divmod(int(self._now() - self._start_s), 60)
        line = f"{minutes:2}:{seconds:02}  {text}"
        if self._is_terminal:
            self._out.write(f"\r\x1b[K{line}" + "\n" * is_last)
        elif is_last or (text != self._text and (is_new or self._now() - self._last_s >= EVERY_S)):
            self._out.write(line + "\n")
            self._last_s = self._now()
        self._text = text
        self._out.flush()


class Steps:
    """Reads the lines of installs, and says what they mean. Safe to share between threads."""

    def __init__(self, progress: Progress, now: Callable[[], float], log: TextIO) -> None:
        self._progress, self._now, self._log = progress, now, log
        self._lock = threading.Lock()
        self._num_fetched = 0
        self._compile_s: float | None = None  # when the first object was begun
        self.num_objects = 0

    def read(self, line: str) -> None:
        """Take one line of the output of pip and of the build that it runs."""
        with self._lock:
            self._log.write(line)
            self._log.flush()
            self._tell(line)

    def _tell(self, line: str) -> None:
        if found := _OBJECT.match(line):
            self._compiled(int(found[1]), int(found[2]))
        elif found := _FETCHED.match(line):
            self._num_fetched += 1
            size = f" ({found[2]})" if found[2] else ""
            self._progress.say(f"download  {self._num_fetched}: {found[1].replace('_', '-')}{size}")
        else:
            for pattern, text in _PHASES:
                if pattern.search(line):
                    self._progress.say(text, is_new=True)

    def _compiled(self, done: int, of: int) -> None:
        now_s = self._now()
        if self._compile_s is None or done == 1:
            self._compile_s = now_s
        self.num_objects = max(self.num_objects, done)
        left_s = (now_s - self._compile_s) / max(1, done - 1) * (of - done)
        left = f", about {max(1, round(left_s / 60))} min left" if done > 4 and done < of else ""
        self._progress.say(f"compile   {done} of {of}{left}", is_last=done == of)


def main(arguments: list[str]) -> int:
    venv, log, *rest = arguments
    python = str(Path(venv) / "bin" / "python")
    commands = _split(rest)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    print(
        f"installing into {venv}: downloads about {DOWNLOAD_MB} MB (half a minute at 10 MB/s, 5 min at 1 MB/s), and "
        f"compiles the kernels (about {max(1, round(COMPILE_CORE_MINUTES / cores))} min on {cores} free cores)",
        flush=True,
    )
    progress = Progress(sys.stdout, time.monotonic)
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile", "-v"]
    with Path(log).open("w") as file, ThreadPoolExecutor(len(commands)) as threads:
        steps = Steps(progress, time.monotonic, file)
        done = list(threads.map(lambda command: run([*pip, *command], steps), commands))
    for status, end in done:
        if status:
            return _failed(log, status, end)
    progress.say("compiling what a server loads", is_new=True)
    subprocess.run([python, "-c", f"import {LOADED}"], capture_output=True)
    built = subprocess.run([python, "-c", "import quire._native"], capture_output=True).returncode == 0
    note = (
        "" if built else f"; the kernels did not compile (no C++20 compiler? see {log}), so it will be slow"
    )
    progress.say(f"installed{note}", is_last=True)
    return 0


def run(command: list[str], steps: Steps) -> tuple[int, str]:
    """Run pip, with its output to ``steps``; return its exit status and the end of its output."""
    end: deque[str] = deque(maxlen=SHOWN_LINES)
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace",
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            end.append(line)
            steps.read(line)
    return process.returncode, "".join(end)


def _split(arguments: Iterable[str]) -> list[list[str]]:
    commands: list[list[str]] = []
    for argument in arguments:
        if argument == "--":
            commands.append([])
        else:
            commands[-1].append(argument)
    return commands


def _failed(log: str, status: int, end: str) -> int:
    print("\n" + end, file=sys.stderr)
    print(f"\npip ended with status {status}; its whole output is in {log}.", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
