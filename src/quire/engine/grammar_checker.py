"""`GrammarChecker`: compiles the grammars of requests in helper processes, and remembers what became of them."""

from __future__ import annotations

import importlib.util
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from importlib import import_module
from typing import Any

from quire.engine import helper_pool
from quire.engine.heartbeat import IDLE_TICK_S
from quire.engine.helper_pool import Head, HelperPool
from quire.errors import RequestError
from quire.structured_outputs import StructuredOutputsParams
from quire.text.token_table import TokenTable, token_table
from quire.text.tokenizer import Tokenizer

_MAX_REMEMBERED = 512  # answers
_MAX_REMEMBERED_BYTES = 64 * 2**20  # grammars and answers together


class GrammarChecker:
    """Belongs to one model and remembers its latest answers. Safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._table: TokenTable | None = None
        self._lock = threading.Lock()
        self.remembered: OrderedDict[str, Head] = OrderedDict()
        self.num_bytes = 0  # remembered
        self._closing = threading.Event()
        self.pool = HelperPool("grammar", self._vocabulary)

    def submit(self, params: StructuredOutputsParams) -> Future[str]:
        """Return the future of the grammar text that `Request.grammar` carries; it raises `RequestError`.

        Raises:
            RequestError: the grammar is wrong in a way that shows without compiling.
            CapacityError: too many grammars wait for the helpers (retryable).
        """
        self._check_possible(params)
        source: str = import_module("quire.text.grammar").grammar_source(params)
        with self._lock:
            known = self.remembered.get(source)
            if known is not None:
                self.remembered.move_to_end(source)
        if known is None:
            return self.pool.submit(
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

    def prepare(self, is_idle: Callable[[], bool]) -> threading.Thread | None:
        """Start the first helper on a thread once ``is_idle``: reading the vocabulary takes a second or two.

        None: no grammar is possible here.
        """
        try:
            self._check_possible(StructuredOutputsParams(json_object=True))
        except RequestError:
            return None

        def run() -> None:
            while not is_idle():
                if self._closing.wait(IDLE_TICK_S):
                    return
            if not self._closing.is_set():
                self.pool.greeting()

        thread = threading.Thread(target=run, name="quire-grammar-helper", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """End the helpers; unfinished grammars fail."""
        self._closing.set()
        self.pool.close()

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

    def _finish(self, source: str, params: StructuredOutputsParams, answer: Head | None, late: bool) -> str:
        if answer is None:
            answer = {
                "error": f"compiling it takes longer than {helper_pool.TASK_LIMIT_S:g} s"
                if late
                else "it is too large or too deep: compiling it took more memory or stack than is allowed"
            }
        with self._lock:
            if source not in self.remembered:
                self.remembered[source] = answer
                self.num_bytes += len(source) + len(str(answer))
            while len(self.remembered) > _MAX_REMEMBERED or self.num_bytes > _MAX_REMEMBERED_BYTES:
                oldest, forgotten = self.remembered.popitem(last=False)
                self.num_bytes -= len(oldest) + len(str(forgotten))
        return _grammar_of(answer, params)


def _grammar_of(answer: Head, params: StructuredOutputsParams) -> str:
    if "error" in answer:
        raise params.wrong(f"{params.param}: this {params.kind} cannot be used: {answer['error']}.")
    grammar: str = answer["grammar"]
    return grammar
