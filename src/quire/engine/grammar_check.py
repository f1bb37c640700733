"""`GrammarChecker`: compiles grammars of requests in helper processes, under limits of time and memory.

A schema can be built to take a compiler hours, all memory, or its stack. So it never meets the process that answers
requests, nor the engine: a helper compiles it first, and is killed when it takes too long. What came out well, and what
did not, is remembered by its text.
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
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import quire
from quire.errors import CapacityError, RequestError
from quire.structured_outputs import StructuredOutputsParams
from quire.text.grammar import grammar_source
from quire.text.grammar_matcher import TokenTable, token_table
from quire.text.tokenizer import Tokenizer

COMPILE_LIMIT_S = 5.0  # by the clock, on a machine that may be busy; `grammar_helper` limits CPU time to less
MEMORY_LIMIT_BYTES = 1 << 30  # beside the vocabulary
_START_LIMIT_S = 60.0  # of a helper, with 256k tokens on a busy machine
_NUM_HELPERS = 2  # a second one, so that one bad grammar does not hold up the good ones
_MAX_WAITING = 64
_MAX_REMEMBERED = 512


class GrammarChecker:
    """Belongs to one model. Helpers start with the first grammar. Safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._table: TokenTable | None = None
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._idle: list[_Helper] = []
        self._all: set[_Helper] = set()
        self._remembered: OrderedDict[str, dict[str, str]] = OrderedDict()
        self._num_waiting = 0
        self._closed = False

    def submit(self, params: StructuredOutputsParams) -> Future[str]:
        """Return the future of the grammar text that `Request.grammar` carries; it raises `RequestError`.

        Raises:
            RequestError: found without compiling.
            CapacityError: too many grammars wait for the helpers (retryable).
        """
        self._check_possible(params)
        source = grammar_source(params)
        done: Future[str] = Future()
        with self._lock:
            known = self._remembered.get(source)
            if known is None:
                if self._num_waiting >= _MAX_WAITING:
                    raise CapacityError(
                        f"{_MAX_WAITING} grammars wait to be compiled: try again later.", retryable=True
                    )
                self._num_waiting += 1
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(_NUM_HELPERS, thread_name_prefix="quire-grammar")
                return self._threads.submit(self._compile, source, params)
            self._remembered.move_to_end(source)
        try:
            done.set_result(_grammar_of(known, params))
        except RequestError as error:
            done.set_exception(error)
        return done

    def check(self, params: StructuredOutputsParams) -> str:
        """As `submit`, and wait for it."""
        return self.submit(params).result()

    def close(self) -> None:
        """End the helpers; grammars in the making fail."""
        with self._lock:
            self._closed = True
            helpers, self._all, self._idle = list(self._all), set(), []
        for helper in helpers:
            helper.kill()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _check_possible(self, params: StructuredOutputsParams) -> None:
        if importlib.util.find_spec("llguidance") is None:
            raise params.wrong(f"{params.param} needs the package llguidance: pip install llguidance.")
        if not any(token_id < self._vocab_size for token_id in self._eos_token_ids):
            raise params.wrong(f"{params.param} needs a model with an EOS token; this one names none.")

    def _compile(self, source: str, params: StructuredOutputsParams) -> str:
        try:
            helper = self._take_helper()
            answer = helper.check(source)
            with self._lock:
                if not helper.alive or self._closed:
                    self._all.discard(helper)
                    helper.kill()
                else:
                    self._idle.append(helper)
                if not self._closed:
                    self._remembered[source] = answer
                if len(self._remembered) > _MAX_REMEMBERED:
                    self._remembered.popitem(last=False)
        finally:
            with self._lock:
                self._num_waiting -= 1
        return _grammar_of(answer, params)

    def _take_helper(self) -> _Helper:
        with self._lock:
            if self._idle:
                return self._idle.pop()
            if self._table is None:
                self._table = token_table(self._tokenizer, self._vocab_size, self._eos_token_ids)
        helper = _Helper(self._table)
        with self._lock:
            self._all.add(helper)
        return helper


def _grammar_of(answer: dict[str, str], params: StructuredOutputsParams) -> str:
    if "error" in answer:
        raise params.wrong(f"{params.param}: this {params.kind} cannot be used: {answer['error']}.")
    return answer["grammar"]


class _Helper:
    """One `quire.engine.grammar_helper`. Used by one thread at a time."""

    def __init__(self, table: TokenTable) -> None:
        here = str(Path(quire.__file__).parents[1])  # the child runs this very package, installed or not
        path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "quire.engine.grammar_helper"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # the last words of a compiler that a stranger made crash
            env={**os.environ, "PYTHONPATH": path},
        )
        self.alive = True
        head = {
            "tokens": [token.decode("latin-1") for token in table.tokens],
            "special": list(table.special_ids),
            "eos": list(table.eos_ids),
            "memory": MEMORY_LIMIT_BYTES,
        }
        self._ask(head, _START_LIMIT_S)

    def check(self, source: str) -> dict[str, str]:
        """Return ``{"grammar": …}`` or ``{"error": …}``; afterwards ``alive`` tells whether it can be used again."""
        answer = self._ask({"source": source}, COMPILE_LIMIT_S) if self.alive else None
        if answer is not None:
            return answer
        if self._popen.poll() is None:
            self.kill()
            return {"error": f"compiling it takes longer than {COMPILE_LIMIT_S:g} s"}
        return {
            "error": "it is too large or too deep: compiling it took more memory or stack than is allowed"
        }

    def kill(self) -> None:
        """End the process and wait for it."""
        self.alive = False
        self._popen.kill()
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout):
            with contextlib.suppress(OSError):  # what was not written yet cannot be
                if pipe is not None:
                    pipe.close()

    def _ask(self, message: dict[str, object], limit_s: float) -> dict[str, str] | None:
        """Return the answer, or None when there is none in time or the process has died."""
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(json.dumps(message).encode() + b"\n")
            self._popen.stdin.flush()
            line = self._read_line(limit_s)
        except (OSError, ValueError):  # it died, or was closed meanwhile
            line = b""
        if not line.endswith(b"\n"):
            self.alive = False
            self._settle()
            return None
        answer: dict[str, str] = json.loads(line)
        return answer

    def _settle(self) -> None:
        """A process that has closed its pipe is as good as dead: wait until it is."""
        try:
            self._popen.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            return

    def _read_line(self, limit_s: float) -> bytes:
        assert self._popen.stdout is not None
        fd = self._popen.stdout.fileno()
        deadline = time.monotonic() + limit_s
        line = b""
        while not line.endswith(b"\n"):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([fd], [], [], left_s)[0]:
                return line
            part = os.read(fd, 1 << 20)
            if not part:
                return line
            line += part
        return line
