"""While the engine rejects requests, what comes on top of those on their way to it is refused unread, and cheaply."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from tests.api.asgi_client import Api, error_of
from tests.api.raw_asgi import RawCall

from quire.api.full_queue import FullQueue
from quire.http.refusals import HttpError, busy

BUSY = busy("The queue is full. Try again in 7 s.", "queue_full", 7)


def test_only_what_comes_on_top_is_refused() -> None:
    now_s, num_open = 100.0, 40
    queue = FullQueue(lambda: num_open, lambda: now_s)
    assert queue.refusal() is None
    queue.rejected(BUSY)  # at 40
    assert queue.refusal() is None
    num_open = 40 + queue.SLACK
    assert queue.refusal() is BUSY
    queue.rejected(BUSY)  # the level stays at the fewest
    num_open = 41
    assert queue.refusal() is None
    num_open = 40 + queue.SLACK
    now_s += queue.MEMORY_S
    assert queue.refusal() is None  # the engine has rejected nothing for a while


def full(api: Api) -> None:
    """Make the API believe that the engine's queue is full."""
    queue = FullQueue(lambda: 1000, lambda: 0.0)
    queue._level, queue._until_s, queue._refusal = 0, 1.0, BUSY
    object.__setattr__(api.app.state.quire, "full_queue", queue)


def test_refusal_is_the_engines_with_its_retry_after() -> None:
    api = Api()
    full(api)
    answer = api.complete()
    assert error_of(answer, 503)["code"] == "queue_full"
    assert answer.headers["retry-after"] == "7"
    assert api.post("/tokenize", {"prompt": "hi"}).status_code == 200  # needs no engine
    assert not api.frontend.submitted


def test_refusing_costs_little() -> None:
    """CPU time of the whole application, per request; before it was that of parsing, tokenizing and a round trip."""
    api = Api()
    full(api)

    async def go() -> float:
        best_s = 1.0
        for _ in range(5):
            start_s = time.thread_time()
            calls: list[Any] = [
                RawCall(api.app, "/v1/completions", {"prompt": "x" * 1000}) for _ in range(200)
            ]
            await asyncio.gather(*(call.task for call in calls))
            best_s = min(best_s, (time.thread_time() - start_s) / len(calls))
            assert all(call.sent[0]["status"] == 503 for call in calls)
        return best_s

    assert asyncio.run(go()) < 0.001  # 0.1 ms here; other tests may load the machine


def test_those_that_return_as_told_reach_the_engine() -> None:
    now_s = 100.0
    queue = FullQueue(lambda: 0, lambda: now_s)
    for i in range(3):
        FullQueue.read([b"promised %d" % i])
        queue.check()
        queue.rejected(BUSY, 7.0)
    FullQueue.read([b"promised 1"])
    now_s = 100.9
    queue._allowed, queue._allowed_s = 0.0, now_s
    with pytest.raises(HttpError) as early:
        queue.check()
    assert early.value.refusal.headers == ((b"retry-after", b"7"),)
    now_s = 107.1
    FullQueue.read([b"other"])
    queue.rejected(BUSY, 7.0)
    queue._allowed, queue._allowed_s = 0.0, now_s
    for i in range(3):  # as promised
        FullQueue.read([b"promised %d" % i])
        queue.check()
    FullQueue.read([b"new"])
    with pytest.raises(HttpError):
        queue.check()
    now_s += queue.MEMORY_S
    queue.check()  # the engine has rejected nothing for a while


def test_the_engine_rejects_a_bounded_number_per_second() -> None:
    now_s = 100.0
    queue = FullQueue(lambda: 0, lambda: now_s)
    seen = 0
    for i in range(10_000):  # 2,000 per second
        now_s += 0.0005
        FullQueue.read([b"body %d" % i])
        try:
            queue.check()
        except HttpError:
            continue
        seen += 1
        queue.rejected(BUSY, 60.0)
    assert seen <= queue.RATE * 6 + 2


def test_refusing_what_was_read_costs_little() -> None:
    """CPU time of the whole application, per request, where the engine rejects all that it is given."""
    api = Api()

    async def go() -> float:
        best_s = 1.0
        for turn in range(5):
            start_s = time.thread_time()
            queue = FullQueue(lambda: 0, lambda: 0.0)
            queue._until_s, queue._refusal, queue._allowed, queue._allowed_s = 1.0, BUSY, 0.0, 0.0
            object.__setattr__(api.app.state.quire, "full_queue", queue)
            calls: list[Any] = [
                RawCall(api.app, "/v1/completions", {"prompt": "x" * 1000 + str((turn, i))})
                for i in range(200)
            ]
            await asyncio.gather(*(call.task for call in calls))
            best_s = min(best_s, (time.thread_time() - start_s) / len(calls))
            assert all(call.sent[0]["status"] == 503 for call in calls)
        return best_s

    seconds = asyncio.run(go())
    print(f"{seconds * 1e3:.3f} ms")
    assert seconds < 0.001  # 0.1 ms here; other tests may load the machine
    assert not api.frontend.submitted
