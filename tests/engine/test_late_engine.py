"""Deadlines that the API process keeps while the engine sends nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from tests.engine.scripted import ScriptedClient
from tests.engine.test_frontend import frontend_over

from quire.engine.frontend import Frontend
from quire.engine.messages import AbortRequest
from quire.request import Deadline, FinishReason, SamplingParams, Terms, TokenEvent

pytestmark = pytest.mark.system


class Stalling(ScriptedClient):
    """An engine that sends one token per sample, and then nothing more."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self._left = num_tokens

    def receive(self, timeout_s: float | None = None) -> list[TokenEvent]:
        if self._left or self.closed:
            self._left -= 1
            return super().receive(timeout_s)
        time.sleep(0.01)
        return []


def over(client: ScriptedClient, body: Callable[[Frontend], Awaitable[None]]) -> None:
    async def main() -> None:
        frontend = frontend_over(client)
        await frontend.start()
        try:
            await asyncio.wait_for(body(frontend), 30)
            assert frontend.num_requests == 0
        finally:
            await frontend.close()

    asyncio.run(main())


def test_a_total_ends_a_request_of_a_silent_engine() -> None:
    client = Stalling(1)

    async def body(frontend: Frontend) -> None:
        deadline = Deadline(first_token_s=0.2, total_s=0.3)
        stream = await frontend.submit("x", SamplingParams(n=2, max_tokens=9), terms=Terms(deadline=deadline))
        for chunk in await stream.collect():
            assert chunk.finish_reason is FinishReason.DEADLINE
            assert chunk.error_kind == "deadline"
            assert chunk.error == "deadline_ms.total = 300 has passed after 1 output tokens."
            assert len(chunk.token_ids) == 1

    over(client, body)
    assert [type(m) for m in client.sent[1:]] == [AbortRequest], "the engine is told"


def test_a_first_token_that_does_not_come_ends_a_request() -> None:
    async def body(frontend: Frontend) -> None:
        deadline = Deadline(first_token_s=0.1)
        stream = await frontend.submit("x", SamplingParams(max_tokens=9), terms=Terms(deadline=deadline))
        (chunk,) = await stream.collect()
        assert chunk.finish_reason is FinishReason.DEADLINE
        assert chunk.error == "deadline_ms.first_token = 100 has passed before the first token."

    over(Stalling(0), body)


def test_a_request_that_ends_in_time_leaves_no_timer() -> None:
    async def body(frontend: Frontend) -> None:
        stream = await frontend.submit(
            "x", SamplingParams(max_tokens=3), terms=Terms(deadline=Deadline(5.0, 9.0))
        )
        timers = list(stream.timers)
        (chunk,) = await stream.collect()
        assert chunk.finish_reason is FinishReason.LENGTH
        assert len(timers) == 2
        assert all(timer.cancelled() for timer in timers)

    over(ScriptedClient(), body)
