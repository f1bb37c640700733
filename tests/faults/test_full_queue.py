"""While the engine rejects requests, what comes on top of those on their way to it is refused unread, and cheaply."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from tests.api.asgi_client import Api, error_of
from tests.api.raw_asgi import RawCall

from quire.api.state import FullQueue
from quire.http.refusals import busy

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
