"""`RequestStream`: the chunks of one request as an async iterator, between the events of the engine and one reader."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence

from quire.engine.output import OutputChunk, RequestOutputState, merge
from quire.metrics.log import Log
from quire.request import FinishReason, TokenEvent, TokenLogprobs

log = Log("frontend")
MAX_UNREAD_BYTES = 16 * 2**20  # of chunks that a stream's reader has not taken, about


class RequestStream:
    """What `Frontend.submit` returns. Iterate over it once, or `collect` it; leaving it early aborts the request.

        async with contextlib.aclosing(await frontend.submit(prompt, sampling)) as stream:
            async for chunk in stream:
                ...

    Exactly one chunk of each of the n samples carries a ``finish_reason``; after the last of them the iteration ends.
    An engine error is a chunk with `FinishReason.ERROR`, not an exception.
    Leaving early means break, an exception, cancellation or `aclose`. A reader that falls `MAX_UNREAD_BYTES` behind is
    cut off: the request ends with an error of the kind "slow_reader". Belongs to the event loop's thread.
    """

    def __init__(self, request_id: str, state: RequestOutputState, abandon: Callable[[], None]) -> None:
        """``abandon`` takes the request out of the engine; it is called at most once."""
        self.request_id = request_id
        self.prompt_token_ids = state.request.prompt_token_ids
        self.adapter = state.request.adapter
        seed = state.request.sampling.seed
        assert seed is not None
        self.seed = seed  # the request's own, or the one chosen for it
        self.output = state  # only this class changes it
        self.timers: list[asyncio.TimerHandle] = []  # of its deadline; cancelled at its end
        self.merges = True  # whether the chunks that a reader fell behind with become one
        self.delivered: Sequence[OutputChunk] = ()  # what the client has of it from another server
        self._abandon = abandon
        self._chunks: deque[OutputChunk] = deque()
        self._unread_bytes = 0
        self._waiter: asyncio.Future[None] | None = None

    async def __aiter__(self) -> AsyncGenerator[OutputChunk, None]:
        try:
            while True:
                while self._chunks:
                    for chunk in self._take():
                        yield chunk
                if self.output.finished:
                    return
                await self._news()
        finally:
            await self.abort()

    async def ended(self) -> None:
        """Wait, before reading, until every sample has its terminal chunk; the chunks stay readable."""
        while not self.output.finished:
            await self._news()

    async def _news(self) -> None:
        """Wait until chunks are added."""
        assert self._waiter is None, "one reader at a time"
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter
        self._waiter = None

    def _take(self) -> list[OutputChunk]:
        """Return the waiting chunks. If the reader fell behind, the chunks of each sample are merged into one."""
        self._unread_bytes = 0
        if len(self._chunks) == 1:
            return [self._chunks.popleft()]
        if not self.merges:
            chunks = list(self._chunks)
            self._chunks.clear()
            return chunks
        samples: dict[int, list[OutputChunk]] = {}
        for chunk in self._chunks:
            samples.setdefault(chunk.index, []).append(chunk)
        self._chunks.clear()
        return [merge(chunks) for chunks in samples.values()]

    async def collect(self) -> tuple[OutputChunk, ...]:
        """Wait for the end and return one chunk per sample, by index."""
        chunks: list[list[OutputChunk]] = [[] for _ in range(self.output.request.sampling.num_samples)]
        async for chunk in self:
            chunks[chunk.index].append(chunk)
        return tuple(merge(each) for each in chunks)

    async def abort(self) -> None:
        """End the request now: open samples get a terminal chunk with `FinishReason.ABORT`. No effect once finished."""
        if not self.output.finished:
            self._push(self.output.end(FinishReason.ABORT))
            self._abandon()

    async def aclose(self) -> None:
        """Leave the stream: `abort`, and drop unread chunks."""
        await self.abort()
        self._chunks.clear()

    def feed(self, event: TokenEvent) -> None:
        """Turn an event into text and wake the reader (called by `OpenStreams`)."""
        if self._unread_bytes > MAX_UNREAD_BYTES:
            log.warning("slow_reader", request_id=self.request_id, unread_mib=self._unread_bytes >> 20)
            text = "The answer was not read fast enough: too much of it waits to be sent."
            self._push(self.output.end(FinishReason.ERROR, text, "slow_reader"))
            self._abandon()
            return
        try:
            chunk = self.output.feed(event)
        except Exception as error:  # an error in one request's text must not end the other streams
            log.exception("output_failed", request_id=self.request_id)
            self._push(self.output.end(FinishReason.ERROR, f"{type(error).__name__}: {error}", "internal"))
            self._abandon()
            return
        if chunk is not None:
            self._unread_bytes += 512 + len(chunk.text) + 64 * sum(map(_num_logprobs, chunk.logprobs or ()))
            self._push([chunk])

    def fail(self, error: str, error_kind: str) -> None:
        """End every open sample with an error (called by `OpenStreams`)."""
        self._push(self.output.end(FinishReason.ERROR, error, error_kind))

    def _push(self, chunks: list[OutputChunk]) -> None:
        self._chunks.extend(chunks)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _num_logprobs(entry: TokenLogprobs) -> int:
    return 1 + len(entry.top_token_ids)
