"""`HelperPool`: work that may take hours, all memory or the stack, done in helper processes under limits.

A grammar or a template can be built to harm the program that reads it. So neither the process that answers requests
nor the engine reads it first: a helper process does, and it is killed when it takes too long.
`quire.engine.grammar_checker` compiles the grammars of requests so, `quire.engine.prompts` renders unknown templates,
and `quire.engine.large_body` parses large bodies.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, TypeVar

from quire.errors import CapacityError
from quire.executor.child_process import child_environment
from quire.units import PIECE_BYTES

T = TypeVar("T")
Kind = Literal["grammar", "template", "text", "body", "image"]
Head = dict[str, Any]
TASK_LIMIT_S = 5.0  # wall clock, on a machine that may be busy
MEMORY_LIMIT_BYTES = 1 << 30  # beyond what a helper holds when it is ready
# Limits for a helper to start on a busy machine, for grammars with a vocabulary of 256k tokens.
_START_LIMIT_S: dict[Kind, float] = {
    "grammar": 60.0, "template": 20.0, "text": 60.0, "body": 20.0, "image": 20.0,
}  # fmt: skip
# A kind that is not named has `TASK_LIMIT_S` and `MEMORY_LIMIT_BYTES`: tokenizing takes 200 bytes per character.
_TEXT_LIMIT_S = 60.0
_TEXT_LIMIT_BYTES = 4 << 30
# With a second helper, one bad task does not delay the good ones.
_NUM_HELPERS = 2
MAX_WAITING = 64
_PLURALS: dict[Kind, str] = {
    "grammar": "grammars",
    "template": "templates",
    "text": "long texts",
    "body": "bodies",
    "image": "images",
}


class Task:
    """One task of a pool. ``task`` is its frame, in pieces."""

    def __init__(self, frame: Sequence[bytes]) -> None:
        self.frame = frame
        self.helper: HelperProcess | None = None  # while it is at work
        self.dropped = False

    def drop(self) -> None:
        """End the task, whose answer is not needed any more. Its helper is killed if it is at work."""
        self.dropped = True
        if self.helper is not None:
            self.helper.signal()


class HelperPool:
    """Up to two helper processes of one kind, started when they are first needed. Safe to share between threads."""

    def __init__(self, kind: Kind, head: Callable[[], Head], num_helpers: int = _NUM_HELPERS) -> None:
        """``head`` returns what a helper is told when it starts (see `quire.engine.helper`)."""
        self._kind = kind
        self._head = head
        self._num_helpers = num_helpers
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self.idle: list[HelperProcess] = []
        self.helpers: set[HelperProcess] = set()
        self._num_waiting = 0
        self._closed = False

    def submit(self, task: Head, finish: Callable[[Head | None, bool], T]) -> Future[T]:
        """Return the future of ``finish(answer, late)``, which is called on another thread; both sides are JSON.

        ``answer`` is None if the helper gave none: it was too ``late``, or it died.

        Raises:
            CapacityError: too many tasks wait for the helpers (retryable).
            RecursionError: ``task`` is nested too deeply for JSON.
        """
        frame = json.dumps(task).encode()
        return self._submit(
            Task([frame]), lambda raw, late: finish(None if raw is None else json.loads(raw), late)
        )

    async def run(self, frame: Sequence[bytes], finish: Callable[[bytearray | None, bool], T]) -> T:
        """Return ``finish(answer, late)`` for a task of bytes, given in pieces. A cancelled task ends at once.

        Raises:
            CapacityError: too many tasks wait for the helpers (retryable).
        """
        task = Task(frame)
        future = self._submit(task, finish)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task.drop()
            raise

    def _submit(self, task: Task, finish: Callable[[bytearray | None, bool], T]) -> Future[T]:
        with self._lock:
            if self._num_waiting >= MAX_WAITING:
                raise CapacityError(
                    f"{MAX_WAITING} {_PLURALS[self._kind]} wait for a helper process: try again later.",
                    retryable=True,
                )
            self._num_waiting += 1
            if self._threads is None:
                self._threads = ThreadPoolExecutor(
                    self._num_helpers, thread_name_prefix=f"quire-{self._kind}"
                )
            future = self._threads.submit(self._perform, task, finish)
        future.add_done_callback(self._ended)
        return future

    def greeting(self) -> Head | None:
        """Start a helper if none is idle, wait for it, and return its first answer; None if it died."""
        helper = self._take()
        self._put_back(helper)
        return helper.greeting

    def close(self) -> None:
        """End the helpers; unfinished tasks fail."""
        with self._lock:
            self._closed = True
            helpers, self.helpers, self.idle = list(self.helpers), set(), []
            threads, self._threads = self._threads, None
        for helper in helpers:
            helper.kill()
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)

    def _ended(self, future: Future[Any]) -> None:
        with self._lock:
            self._num_waiting -= 1

    def _perform(self, task: Task, finish: Callable[[bytearray | None, bool], T]) -> T:
        answer, late = self._attempt(task)
        if answer is None and not late and not task.dropped:  # died, of the task or of a kill from outside
            answer, late = self._attempt(task)
        return finish(answer, late)

    def _attempt(self, task: Task) -> tuple[bytearray | None, bool]:
        """Return a helper's answer, or None and whether it was too late."""
        helper = self._take()
        task.helper = helper
        ready = helper.greeting is not None and not task.dropped
        limit_s = _TEXT_LIMIT_S if self._kind == "text" else TASK_LIMIT_S
        answer = helper.ask(task.frame, limit_s) if ready else None
        task.helper = None
        late = answer is None and helper.is_running()
        self._put_back(helper)
        return answer, late

    def _take(self) -> HelperProcess:
        with self._lock:
            while self.idle:
                helper = self.idle.pop()
                if helper.is_running(0.0):
                    return helper
                self.helpers.discard(helper)
                helper.kill()
        memory = _TEXT_LIMIT_BYTES if self._kind == "text" else MEMORY_LIMIT_BYTES
        helper = HelperProcess(self._kind, {**self._head(), "memory": memory})
        with self._lock:
            self.helpers.add(helper)
        return helper

    def _put_back(self, helper: HelperProcess) -> None:
        with self._lock:
            if helper.alive and not self._closed:
                self.idle.append(helper)
                return
            self.helpers.discard(helper)
        helper.kill()


class HelperProcess:
    """One ``python -m quire.engine.helper``. Used by one thread at a time."""

    def __init__(self, kind: Kind, head: Head) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "quire.engine.helper", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a crash that a client caused must not fill the server's log
            bufsize=0,
            env={**child_environment(), "TOKENIZERS_PARALLELISM": "false"},
        )
        self.alive = True
        assert self.popen.stdin is not None
        os.set_blocking(self.popen.stdin.fileno(), False)
        for pipe in (self.popen.stdin, self.popen.stdout):
            with contextlib.suppress(OSError, AttributeError):  # other systems than Linux
                assert pipe is not None
                fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, PIECE_BYTES)  # the most for a user
        raw = self.ask([json.dumps(head).encode()], _START_LIMIT_S[kind])
        self.greeting: Head | None = None if raw is None else json.loads(raw)

    def ask(self, frame: Sequence[bytes], limit_s: float) -> bytearray | None:
        """Return the answer to a task. None if there is none in time, or the process died; ``alive`` is false then."""
        assert self.popen.stdin is not None
        deadline = time.monotonic() + limit_s
        try:
            self._write(sum(map(len, frame)).to_bytes(8), deadline)
            for piece in frame:
                self._write(piece, deadline)
            return self._read(int.from_bytes(self._read(8, deadline)), deadline)
        except (OSError, ValueError):  # the process died, is too late, or `kill` closed the pipe
            self.alive = False
            return None

    def is_running(self, wait_s: float = 0.2) -> bool:
        """Return whether the process lives; one that has closed its pipe gets a moment to end."""
        try:
            self.popen.wait(timeout=wait_s)
        except subprocess.TimeoutExpired:
            return True
        return False

    def signal(self) -> None:
        """Kill the process; the thread that waits for its answer sees the end."""
        self.popen.kill()

    def kill(self) -> None:
        """End the process and wait for it."""
        self.alive = False
        self.popen.kill()
        self.popen.wait()
        for pipe in (self.popen.stdin, self.popen.stdout):
            with contextlib.suppress(OSError):  # unwritten bytes cannot be flushed any more
                if pipe is not None:
                    pipe.close()

    def _write(self, piece: bytes, deadline: float) -> None:
        assert self.popen.stdin is not None
        fd, view = self.popen.stdin.fileno(), memoryview(piece)
        while view:
            self._wait([], [fd], deadline)
            with contextlib.suppress(BlockingIOError):
                view = view[os.write(fd, view[:PIECE_BYTES]) :]

    def _read(self, num_bytes: int, deadline: float) -> bytearray:
        assert self.popen.stdout is not None
        fd, answer = self.popen.stdout.fileno(), bytearray(num_bytes)
        left = memoryview(answer)
        while left:
            self._wait([fd], [], deadline)
            num_read = os.readv(fd, [left[:PIECE_BYTES]])
            if not num_read:
                raise BrokenPipeError("The helper ended.")
            left = left[num_read:]
        return answer

    def _wait(self, reads: list[int], writes: list[int], deadline: float) -> None:
        if not any(select.select(reads, writes, [], max(0.0, deadline - time.monotonic()))):
            raise TimeoutError
