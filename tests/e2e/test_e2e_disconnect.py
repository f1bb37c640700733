"""From a client that leaves to free blocks, counted in steps of the real core (fake executor, in this process)."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

import pytest
from tests.api.raw_asgi import RawCall
from tests.engine.toy import byte_tokenizer, engine_config, model_info
from tests.fakes.engine import FAKE

from quire.api.app import create_app
from quire.api.settings import ApiSettings
from quire.clock import WallClock
from quire.engine.frontend import Frontend
from quire.engine.in_process import InProcessClient
from quire.text.chat_template import ChatTemplate

STEP_MS = 10
LONG: dict[str, Any] = {"ignore_eos": True, "max_tokens": 180, "prompt": "x" * 40}


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.0005)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_blocks_are_free_within_two_steps(stream: bool, n: int) -> None:
    async def go() -> None:
        clock, tokenizer = WallClock(), byte_tokenizer()
        client = InProcessClient(engine_config(), clock, executor=f"{FAKE}@{STEP_MS}")
        template = ChatTemplate.of(tokenizer, datetime.now)
        frontend = Frontend(client, tokenizer, template, model_info(), clock)
        app = create_app(frontend, ApiSettings())
        await frontend.start()
        try:
            other = RawCall(app, "/v1/completions", LONG)  # keeps the engine stepping
            await until(lambda: client.stats().num_running == 1)
            leaving = {**LONG, "prompt": "y" * 40, "n": n, "stream": stream}
            call = RawCall(app, "/v1/completions", leaving)
            await until(lambda: client.stats().num_running == 1 + n)
            if stream:
                await asyncio.wait_for(call.first_body.wait(), 10)
            call.disconnect()
            await asyncio.wait_for(call.task, 60)
            left_at = client.stats().num_steps
            await until(lambda: client.stats().num_running == 1)
            stats = client.stats()
            assert stats.num_steps - left_at <= 2
            held = stats.num_blocks - stats.num_free_blocks - stats.num_idle_blocks
            assert held <= -(-(40 + 180) // 16)  # those of the other request
            assert stats.num_aborted == n
            other.disconnect()
            await asyncio.wait_for(other.task, 60)
            await until(lambda: client.stats().kv_usage == 0)
        finally:
            await frontend.close()

    asyncio.run(go())
