"""The first structured answer of a server is no slower than the second: the tables are there before it comes."""

from __future__ import annotations

import threading

import pytest
from tests.engine.toy import byte_tokenizer

import quire.sampling.grammars as grammars_module
from quire.engine.grammar_checker import GrammarChecker
from quire.models.checkpoint import read_tokenizer
from quire.models.hub import quill_path
from quire.sampling.grammars import Grammars
from quire.structured_outputs import StructuredOutputsParams


def test_tables_of_a_worker_are_built_while_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    path = quill_path("quill")
    tokenizer = read_tokenizer(path)
    grammars = Grammars(str(path), tokenizer.vocab_size, 1)
    eos = tuple(dict.fromkeys((0, *tokenizer.eos_token_ids)))
    waits: list[str] = []
    thread = grammars.prepare((0,), lambda: not waits.append("asked"))
    assert thread is not None
    thread.join(60.0)
    assert len(waits) == 3, "each part waits until no step runs"

    def built_again(*_: object) -> None:
        raise AssertionError("a table is built with the first grammar")

    for name in ("read_tokenizer", "token_table", "ll_tokenizer"):
        monkeypatch.setattr(grammars_module, name, built_again)
    assert grammars._tokenizer_for(eos)[1].tokens


def test_tables_are_not_built_when_the_engine_ends_first() -> None:
    path = quill_path("quill")
    grammars = Grammars(str(path), 100, 1)
    thread = grammars.prepare((0,), lambda: False)
    assert thread is not None
    thread.join(60.0)
    assert grammars._tokenizer is None


def test_the_helper_waits_for_an_idle_server_and_is_there_then() -> None:
    checker = GrammarChecker(byte_tokenizer(), 256 + 1, (256,))
    busy = threading.Event()
    thread = checker.prepare(busy.is_set)
    assert thread is not None
    assert not checker.pool.helpers
    busy.set()
    thread.join(60.0)
    (helper,) = checker.pool.helpers
    assert checker.check(StructuredOutputsParams(json_object=True))
    assert checker.pool.helpers == {helper}
    checker.close()


def test_a_server_that_ends_starts_no_helper() -> None:
    checker = GrammarChecker(byte_tokenizer(), 256 + 1, (256,))
    thread = checker.prepare(lambda: False)
    checker.close()
    assert thread is not None
    thread.join(60.0)
    assert not checker.pool.helpers
