"""The helper process: bad grammars are rejected in time, whatever they do to a compiler, and the next one compiles."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from tests.engine.toy import EOS, VOCAB, byte_tokenizer

from quire.engine import grammar_checker, helper_pool
from quire.engine.grammar_checker import GrammarChecker
from quire.errors import CapacityError, RequestError
from quire.structured_outputs import StructuredOutputsParams

pytestmark = pytest.mark.system

FINE = StructuredOutputsParams(json={"type": "object"})


@pytest.fixture
def checker() -> Iterator[GrammarChecker]:
    made = GrammarChecker(byte_tokenizer(), VOCAB, (EOS, VOCAB + 7))
    yield made
    made.close()


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def wide(count: int) -> dict[str, Any]:
    pattern = "(a|b|ab|ba){1,300}c{100}[a-z]{1,900}"
    return {"type": "object", "properties": {f"k{i}": {"pattern": pattern + str(i)} for i in range(count)}}


SLOW = StructuredOutputsParams(json=wide(3000))
WRONG = [
    (StructuredOutputsParams(json={"type": "array", "unevaluatedItems": False}), "unevaluatedItems"),
    (StructuredOutputsParams(regex="(?=a)b"), "look-ahead"),
    (StructuredOutputsParams(regex="[a"), "unclosed"),
    (StructuredOutputsParams(grammar="start: nothing"), "nothing"),
    (StructuredOutputsParams(json=nested(200)), "recursion limit"),
    (StructuredOutputsParams(json='{"items":' * 50_000), "too deep"),
    (StructuredOutputsParams(regex="(" * 50_000 + "a" + ")" * 50_000), "invalid regex"),
]


def test_remembered_grammars_are_bounded(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checker, "_MAX_REMEMBERED_BYTES", 100_000)
    for i in range(20):
        checker.check(StructuredOutputsParams(choice=[f"{i}" + "x" * 5000, "b"]))
        sizes = [len(source) + len(str(answer)) for source, answer in checker.remembered.items()]
        assert checker.num_bytes == sum(sizes) <= 100_000
    assert 2 < len(checker.remembered) < 20


def test_what_is_wrong_is_named(checker: GrammarChecker) -> None:
    for params, said in WRONG:
        with pytest.raises(RequestError, match=said) as caught:
            checker.check(params)
        assert caught.value.param == "structured_outputs"
        assert len(str(caught.value)) < 800
    assert "json_schema" in checker.check(FINE)
    assert len(checker.pool.helpers) == 1, "one process was enough"


def test_what_takes_too_long_is_refused(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(helper_pool, "TASK_LIMIT_S", 1.0)
        with pytest.raises(RequestError, match="longer than 1 s"):
            checker.check(SLOW)
    with pytest.raises(RequestError):
        checker.check(SLOW)  # remembered
    monkeypatch.setattr(helper_pool, "TASK_LIMIT_S", 60.0)
    assert checker.check(StructuredOutputsParams(regex="a")), "a new helper takes over"


def test_a_helper_killed_while_idle_costs_no_request(checker: GrammarChecker) -> None:
    checker.check(FINE)
    (helper,) = checker.pool.helpers
    helper.popen.kill()
    helper.popen.wait()
    assert checker.check(StructuredOutputsParams(regex="ab"))
    assert len(checker.pool.helpers) == 1, "the dead one is forgotten"


def test_a_helper_killed_at_work_is_replaced_once(checker: GrammarChecker) -> None:
    def kill_at_work(future: Future[Any], times: int) -> bool:
        """Whether as many were seen at work before the answer came."""
        killed: set[object] = set()
        while len(killed) < times and not future.done():
            for helper in list(checker.pool.helpers):
                if helper not in killed and helper not in checker.pool.idle:
                    helper.signal()
                    killed.add(helper)
            time.sleep(0.001)
        return len(killed) == times

    for length in range(20, 120):  # a short one may be done before it is seen
        future = checker.submit(StructuredOutputsParams(regex=f"a{{1,{length}}}"))
        was_killed = kill_at_work(future, 1)
        assert future.result()
        if was_killed:
            break
    assert was_killed
    future = checker.submit(SLOW)
    assert kill_at_work(future, 2)
    with pytest.raises(RequestError, match="memory or stack"):
        future.result()
    assert checker.check(FINE)


def test_a_bad_grammar_does_not_hold_up_a_good_one(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helper_pool, "TASK_LIMIT_S", 120.0)
    slow = checker.submit(SLOW)
    assert checker.check(FINE)
    assert not slow.done()
    for helper in checker.pool.helpers - set(
        checker.pool.idle
    ):  # the task is tried again: then its limit counts
        monkeypatch.setattr(helper_pool, "TASK_LIMIT_S", 0.1)
        helper.signal()
    with pytest.raises(RequestError):
        slow.result()


def test_the_queue_is_bounded(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper_pool, "MAX_WAITING", 2)
    futures = [checker.submit(StructuredOutputsParams(regex=f"a{i}")) for i in range(2)]
    with pytest.raises(CapacityError) as caught:
        checker.submit(StructuredOutputsParams(regex="b"))
    assert caught.value.retryable
    assert all(future.result() for future in futures)


def test_the_event_loop_goes_on_meanwhile(checker: GrammarChecker) -> None:
    async def ticks() -> int:
        future = asyncio.wrap_future(checker.submit(StructuredOutputsParams(regex="x")))
        count = 0
        while not future.done():
            await asyncio.sleep(0.005)
            count += 1
        assert future.result()
        return count

    assert asyncio.run(ticks()) > 3


def test_no_eos_no_grammar() -> None:
    with pytest.raises(RequestError, match="EOS"):
        GrammarChecker(byte_tokenizer(), VOCAB, ()).check(FINE)
