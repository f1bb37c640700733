"""A client that leaves aborts its request, whatever the request is doing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.api.asgi_client import Api
from tests.api.raw_asgi import RawCall

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_aborts_its_request(stream: bool, n: int) -> None:
    async def go() -> None:
        api = Api()
        api.frontend.gate = asyncio.Event()  # the engine stays busy after the first token
        call = RawCall(api.app, "/v1/chat/completions", {**CHAT, "stream": stream, "n": n})
        await until(lambda: api.frontend.submitted)
        if stream:
            await asyncio.wait_for(call.first_body.wait(), 5)
        call.disconnect()
        await asyncio.wait_for(call.task, 60)
        (submitted,) = api.frontend.submitted
        assert submitted.aborted
        assert submitted.stream.output.finished
        metrics = api.app.state.quire.metrics
        assert metrics.counters["quire:http_disconnects"] == 1
        assert metrics.finished["abort"] == n
        assert metrics.responses["/v1/chat/completions", "499"] == 1

    asyncio.run(go())


def test_all_prompts_of_a_list_are_aborted() -> None:
    async def go() -> None:
        api = Api()
        api.frontend.gate = asyncio.Event()
        call = RawCall(api.app, "/v1/completions", {"prompt": ["a", "b", "c"], "stream": True})
        await asyncio.wait_for(call.first_body.wait(), 5)
        call.disconnect()
        await asyncio.wait_for(call.task, 60)
        assert [s.aborted for s in api.frontend.submitted] == [True] * 3

    asyncio.run(go())


def test_leaving_before_the_body_is_read_runs_nothing() -> None:
    async def go() -> None:
        api = Api()
        call = RawCall(api.app, "/v1/completions", {"prompt": "a"})
        call._inbox.get_nowait()
        call.disconnect()
        await asyncio.wait_for(call.task, 60)
        assert not api.frontend.submitted
        assert not call.sent

    asyncio.run(go())


@pytest.mark.parametrize("stream", [False, True])
def test_the_end_of_an_answer_is_no_disconnection(stream: bool) -> None:
    """Servers report their own end of the answer as http.disconnect, too."""

    async def go() -> None:
        api = Api()
        call = RawCall(api.app, "/v1/completions", {"prompt": "a", "stream": stream, "max_tokens": 40})
        call.disconnects_at_end = True
        await asyncio.wait_for(call.task, 60)
        metrics = api.app.state.quire.metrics
        assert metrics.counters["quire:http_disconnects"] == 0
        assert metrics.responses["/v1/completions", "200"] == 1
        assert not api.frontend.submitted[0].aborted

    asyncio.run(go())


@pytest.mark.parametrize("stream", [False, True])
def test_cancelling_the_handler_aborts(stream: bool) -> None:
    """The server cancels handlers when its grace time is over."""

    async def go() -> None:
        api = Api()
        api.frontend.gate = asyncio.Event()
        call = RawCall(api.app, "/v1/chat/completions", {**CHAT, "stream": stream})
        await until(lambda: api.frontend.submitted)
        call.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.task
        assert api.frontend.submitted[0].aborted

    asyncio.run(go())
