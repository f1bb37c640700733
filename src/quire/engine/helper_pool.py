"""`HelperPool`: work that may take hours, all memory or the stack, done in helper processes under limits.

A grammar or a template can be built to harm the program that reads it. So neither the process that answers requests
nor the engine reads it first: a helper process does, and it is killed when it takes too long. `GrammarChecker` compiles
the grammars of requests so; `quire.engine.frontend` renders unknown templates so.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, TypeVar

from quire.engine.spawn import child_environment
from quire.errors import CapacityError, RequestError
from quire.structured_outputs import StructuredOutputsParams
from quire.text.grammar import grammar_source
from quire.text.grammar_matcher import TokenTable, token_table
from quire.text.tokenizer import Tokenizer

_MAX_REMEMBERED = 512


class GrammarChecker:
    """Belongs to one model and remembers its latest answers. Safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._table: TokenTable | None = None
        self._lock = threading.Lock()
        self._remembered: OrderedDict[str, Answer] = OrderedDict()
        self._pool = HelperPool("grammar", self._vocabulary)

    def submit(self, params: StructuredOutputsParams) -> Future[str]:
        """Return the future of the grammar text that `Request.grammar` carries; it raises `RequestError`.

        Raises:
            RequestError: the grammar is wrong in a way that shows without compiling.
            CapacityError: too many grammars wait for the helpers (retryable).
        """
        self._check_possible(params)
        source = grammar_source(params)
        with self._lock:
            known = self._remembered.get(source)
            if known is not None:
                self._remembered.move_to_end(source)
        if known is None:
            return self._pool.submit(
                {"source": source}, lambda answer, late: self._finish(source, params, answer, late)
            )
        done: Future[str] = Future()
        try:
            done.set_result(_grammar_of(known, params))
        except RequestError as error:
            done.set_exception(error)
        return done

    def check(self, params: StructuredOutputsParams) -> str:
        """As `submit`, but wait for the result."""
        return self.submit(params).result()

    def close(self) -> None:
        """End the helpers; unfinished grammars fail."""
        self._pool.close()

    def _check_possible(self, params: StructuredOutputsParams) -> None:
        if importlib.util.find_spec("llguidance") is None:
            raise params.wrong(f"{params.param} needs the package llguidance: pip install llguidance.")
        if not any(token_id < self._vocab_size for token_id in self._eos_token_ids):
            raise params.wrong(f"{params.param} needs a model with an EOS token; this one names none.")

    def _vocabulary(self) -> dict[str, Any]:
        with self._lock:
            if self._table is None:
                self._table = token_table(self._tokenizer, self._vocab_size, self._eos_token_ids)
        return {
            "tokens": [token.decode("latin-1") for token in self._table.tokens],
            "special": list(self._table.special_ids),
            "eos": list(self._table.eos_ids),
        }

    def _finish(self, source: str, params: StructuredOutputsParams, answer: Answer | None, late: bool) -> str:
        if answer is None:
            answer = {
                "error": f"compiling it takes longer than {TASK_LIMIT_S:g} s"
                if late
                else "it is too large or too deep: compiling it took more memory or stack than is allowed"
            }
        with self._lock:
            self._remembered[source] = answer
            if len(self._remembered) > _MAX_REMEMBERED:
                self._remembered.popitem(last=False)
        return _grammar_of(answer, params)


def _grammar_of(answer: Answer, params: StructuredOutputsParams) -> str:
    if "error" in answer:
        raise params.wrong(f"{params.param}: this {params.kind} cannot be used: {answer['error']}.")
    grammar: str = answer["grammar"]
    return grammar


T = TypeVar("T")
Answer = dict[str, Any]
TASK_LIMIT_S = 5.0  # wall clock, on a machine that may be busy
MEMORY_LIMIT_BYTES = 1 << 30  # beyond what a helper holds when it is ready
# Limits for a helper to start on a busy machine, for grammars with a vocabulary of 256k tokens.
_START_LIMIT_S = {"grammar": 60.0, "template": 20.0}
# With a second helper, one bad task does not delay the good ones.
_NUM_HELPERS = 2
MAX_WAITING = 64


class HelperPool:
    """Up to two helper processes of one kind, started when they are first needed. Safe to share between threads."""

    def __init__(self, kind: Literal["grammar", "template"], head: Callable[[], Answer]) -> None:
        """``head`` returns what a helper is told when it starts (see `quire.engine.helper`)."""
        self._kind = kind
        self._head = head
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._idle: list[HelperProcess] = []
        self._all: set[HelperProcess] = set()
        self._num_waiting = 0
        self._closed = False

    def submit(self, task: Answer, finish: Callable[[Answer | None, bool], T]) -> Future[T]:
        """Return the future of ``finish(answer, late)``, which is called on another thread.

        ``answer`` is None if the helper gave none: it was too ``late``, or it died.

        Raises:
            CapacityError: too many tasks wait for the helpers (retryable).
            RecursionError: ``task`` is nested too deeply for JSON.
        """
        line = json.dumps(task).encode() + b"\n"
        with self._lock:
            if self._num_waiting >= MAX_WAITING:
                raise CapacityError(
                    f"{MAX_WAITING} {self._kind}s wait for a helper process: try again later.", retryable=True
                )
            self._num_waiting += 1
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_NUM_HELPERS, thread_name_prefix=f"quire-{self._kind}")
            return self._threads.submit(self._perform, line, finish)

    def greeting(self) -> Answer | None:
        """Start a helper if none is idle, wait for it, and return its first answer; None if it died."""
        helper = self._take()
        self._put_back(helper)
        return helper.greeting

    def close(self) -> None:
        """End the helpers; unfinished tasks fail."""
        with self._lock:
            self._closed = True
            helpers, self._all, self._idle = list(self._all), set(), []
        for helper in helpers:
            helper.kill()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _perform(self, line: bytes, finish: Callable[[Answer | None, bool], T]) -> T:
        try:
            helper = self._take()
            answer = helper.ask(line, TASK_LIMIT_S) if helper.greeting is not None else None
            late = answer is None and helper.is_running()
            self._put_back(helper)
        finally:
            with self._lock:
                self._num_waiting -= 1
        return finish(answer, late)

    def _take(self) -> HelperProcess:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        helper = HelperProcess(self._kind, {**self._head(), "memory": MEMORY_LIMIT_BYTES})
        with self._lock:
            self._all.add(helper)
        return helper

    def _put_back(self, helper: HelperProcess) -> None:
        with self._lock:
            if helper.alive and not self._closed:
                self._idle.append(helper)
                return
            self._all.discard(helper)
        helper.kill()


class HelperProcess:
    """One ``python -m quire.engine.helper``. Used by one thread at a time."""

    def __init__(self, kind: str, head: Answer) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "quire.engine.helper", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a crash that a client caused must not fill the server's log
            env=child_environment(),
        )
        self.alive = True
        self.greeting = self.ask(json.dumps(head).encode() + b"\n", _START_LIMIT_S[kind])

    def ask(self, line: bytes, limit_s: float) -> Answer | None:
        """Return the answer to a task. None if there is none in time, or the process died; ``alive`` is false then."""
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(line)
            self._popen.stdin.flush()
            read = self._read_line(limit_s)
        except (OSError, ValueError):  # the process died, or `kill` closed the pipe
            read = b""
        if not read.endswith(b"\n"):
            self.alive = False
            return None
        answer: Answer = json.loads(read)
        return answer

    def is_running(self) -> bool:
        """Return whether the process lives; one that has closed its pipe gets a moment to end."""
        try:
            self._popen.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            return True
        return False

    def kill(self) -> None:
        """End the process and wait for it."""
        self.alive = False
        self._popen.kill()
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout):
            with contextlib.suppress(OSError):  # unwritten bytes cannot be flushed any more
                if pipe is not None:
                    pipe.close()

    def _read_line(self, limit_s: float) -> bytes:
        assert self._popen.stdout is not None
        fd = self._popen.stdout.fileno()
        deadline = time.monotonic() + limit_s
        chunks: list[bytes] = []
        while not (chunks and chunks[-1].endswith(b"\n")):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([fd], [], [], left_s)[0]:
                break
            chunk = os.read(fd, 1 << 20)
            if not chunk:
                break
            chunks.append(chunk)
        return b"".join(chunks)
