"""`RequestStream`: the chunks of one request, as an async iterator that gives up its request when it is left."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable

from quire.engine.output import OutputChunk, RequestOutputState, merge
from quire.metrics.log import Log
from quire.request import FinishReason, TokenEvent

log = Log("stream")


class RequestStream:
    """What `Frontend.submit` returns. Iterate it once, or `collect` it; leave it and the request is aborted.

        async with contextlib.aclosing(await frontend.submit(prompt, sampling)) as stream:
            async for chunk in stream:
                ...

    Exactly one chunk of each of the n samples carries a ``finish_reason``; after the last one the iteration ends. An
    error of the engine is a chunk with `FinishReason.ERROR`, not an exception (`quire.engine.output.error_of` makes
    one). Leaving early (break, an exception, cancellation, `aclose`) aborts the request in the engine. The event loop's
    thread owns it.
    """

    def __init__(self, request_id: str, state: RequestOutputState, give_up: Callable[[], None]) -> None:
        """``give_up`` takes the request out of the engine; called at most once."""
        self.request_id = request_id
        self.prompt_token_ids = state.request.prompt_token_ids
        self.adapter = state.request.adapter
        seed = state.request.sampling.seed
        assert seed is not None
        self.seed = seed  # the request's own, or the one drawn for it
        self.output = state  # its numbers, and whether it is over; only this class changes it
        self._give_up = give_up
        self._chunks: deque[OutputChunk] = deque()
        self._waiter: asyncio.Future[None] | None = None

    async def __aiter__(self) -> AsyncGenerator[OutputChunk, None]:
        try:
            while True:
                while self._chunks:
                    for chunk in self._take():
                        yield chunk
                if self.output.finished:
                    return
                assert self._waiter is None, "one reader at a time"
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
                self._waiter = None
        finally:
            await self.abort()

    def _take(self) -> list[OutputChunk]:
        """Return what waits. Chunks of a sample are one by now if the reader, or its client's socket, fell behind."""
        if len(self._chunks) == 1:
            return [self._chunks.popleft()]
        samples: dict[int, list[OutputChunk]] = {}
        for chunk in self._chunks:
            samples.setdefault(chunk.index, []).append(chunk)
        self._chunks.clear()
        return [merge(chunks) for chunks in samples.values()]

    async def collect(self) -> tuple[OutputChunk, ...]:
        """Wait for the end and return one whole chunk for each sample, by index."""
        parts: list[list[OutputChunk]] = [[] for _ in range(self.output.request.sampling.num_samples)]
        async for chunk in self:
            parts[chunk.index].append(chunk)
        return tuple(merge(chunks) for chunks in parts)

    async def abort(self) -> None:
        """End the request now. Open samples get a terminal chunk with `FinishReason.ABORT`. Harmless when finished."""
        if not self.output.finished:
            self._push(self.output.end(FinishReason.ABORT))
            self._give_up()

    async def aclose(self) -> None:
        """Leave the stream: `abort`, and drop what was not read."""
        await self.abort()
        self._chunks.clear()

    def feed(self, event: TokenEvent) -> None:
        """Turn an event into text and wake the reader (called by the frontend)."""
        try:
            chunk = self.output.feed(event)
        except Exception as error:  # one request's text must not take the streams of the others along
            log.exception("output_failed", request_id=self.request_id)
            self._push(self.output.end(FinishReason.ERROR, f"{type(error).__name__}: {error}", "internal"))
            self._give_up()
            return
        if chunk is not None:
            self._push([chunk])

    def fail(self, error: str, error_kind: str) -> None:
        """End every open sample with an error (called by the frontend)."""
        self._push(self.output.end(FinishReason.ERROR, error, error_kind))

    def _push(self, chunks: list[OutputChunk]) -> None:
        self._chunks.extend(chunks)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


async def ended(stream: RequestStream) -> None:
    """Wait until every sample has its terminal chunk, before anybody reads; the chunks stay."""
    while not stream.output.finished:
        assert stream._waiter is None, "one reader at a time"
        stream._waiter = asyncio.get_running_loop().create_future()
        await stream._waiter
        stream._waiter = None
