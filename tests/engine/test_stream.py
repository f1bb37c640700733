"""A reader that falls behind gets fewer and longer chunks, and the same text."""

from __future__ import annotations

import asyncio

import pytest
from tests.engine.toy import byte_tokenizer, ids

from quire.engine.output import OutputChunk, RequestOutputState, merge
from quire.engine.stream import RequestStream
from quire.request import FinishReason, Request, SamplingParams, TokenEvent, TokenLogprobs

TOKENIZER = byte_tokenizer()
TEXT = "what is read late is read whole"


@pytest.mark.parametrize("pause_every", [1, 4, 100])
def test_waiting_chunks_come_as_one_for_each_sample(pause_every: int) -> None:
    sampling = SamplingParams(max_tokens=100, n=2, seed=1)
    request = Request("r", tuple(ids("prompt")), sampling, arrival_s=0.0)

    async def read() -> list[OutputChunk]:
        state = RequestOutputState(request, TOKENIZER, lambda message: None)
        stream = RequestStream("r", state, lambda: None)
        tokens = TOKENIZER.encode(TEXT, add_special_tokens=False)

        async def feed() -> None:
            for count, token_id in enumerate(tokens, 1):
                last = FinishReason.LENGTH if count == len(tokens) else None
                for index in range(2):
                    stream.feed(TokenEvent("r", index, (token_id,), finish_reason=last))
                if count % pause_every == 0:
                    await asyncio.sleep(0)

        feeding = asyncio.create_task(feed())
        chunks = [chunk async for chunk in stream]
        await feeding
        return chunks

    chunks = asyncio.run(read())
    for index in range(2):
        own = [chunk for chunk in chunks if chunk.index == index]
        whole = merge(own)
        assert whole.text == TEXT
        assert whole.finish_reason is FinishReason.LENGTH
        assert [chunk.finish_reason is not None for chunk in own] == [False] * (len(own) - 1) + [True]
        if pause_every == 100:
            assert len(own) == 1
        elif pause_every == 1:
            assert len(own) > len(whole.token_ids) // 2


def test_a_stream_that_is_not_read_holds_a_bounded_amount(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.stream.MAX_UNREAD_BYTES", 20_000)
    request = Request("r", tuple(ids("prompt")), SamplingParams(max_tokens=10_000, seed=1), arrival_s=0.0)
    abandoned: list[str] = []

    async def read() -> list[OutputChunk]:
        stream = RequestStream(
            "r", RequestOutputState(request, TOKENIZER, lambda message: None), lambda: abandoned.append("r")
        )
        entries = (TokenLogprobs(65, -1.0, 1, tuple(range(20)), (0.0,) * 20),)
        for _ in range(1000):
            if not stream.output.finished:
                stream.feed(TokenEvent("r", 0, (65,), entries))
        return [chunk async for chunk in stream]

    (chunk,) = asyncio.run(read())
    assert abandoned == ["r"]
    assert (chunk.finish_reason, chunk.error_kind) == (FinishReason.ERROR, "slow_reader")
    assert len(chunk.token_ids) < 20
