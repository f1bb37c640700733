"""`RequestStream`: the chunks of one request as an async iterator; `OpenStreams`: those in flight, by request."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence

from quire.engine.messages import AbortRequest, Message
from quire.engine.output import OutputChunk, RequestOutputState, merge
from quire.metrics.log import Log
from quire.request import Adapter, FinishReason, TokenEvent, TokenLogprobs

log = Log("frontend")
DEADLINE_GRACE_S = 0.1  # for the engine, which knows best when a deadline has passed
MAX_UNREAD_BYTES = 16 * 2**20  # unread chunks of one stream, about


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
        self.timers: list[asyncio.TimerHandle] = []  # deadline timers, cancelled at its end
        self.merges = True  # whether the chunks that a reader fell behind with become one
        self.delivered: Sequence[OutputChunk] = ()  # sent to the client by another server
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
        return tuple(merge(parts) for parts in chunks)

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
        except Exception as error:
            # An error in one request's text must not end the other streams.
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


class OpenStreams:
    """The streams in flight: from `add` until every sample has its terminal chunk. Belongs to one event loop."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._open: dict[str, RequestStream] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._left = asyncio.Event()  # set when a stream ends

    def __len__(self) -> int:
        return len(self._open)

    def add(self, request_id: str, stream: RequestStream, now_s: float) -> None:
        """Take a stream in. Its deadline is kept here too, for an engine that is late itself, or hangs."""
        self._open[request_id] = stream
        self._idle.clear()
        request = stream.output.request
        deadline = request.terms.deadline
        if deadline is None:
            return
        loop, begin_s = asyncio.get_running_loop(), request.arrival_s - now_s + DEADLINE_GRACE_S
        limits = ("first_token", deadline.first_token_s), ("total", deadline.total_s)
        for name, limit_s in limits:
            if limit_s is not None:
                delay_s = max(0.0, begin_s + limit_s)
                stream.timers.append(loop.call_later(delay_s, self._expire, request_id, name))

    def _expire(self, request_id: str, name: str) -> None:
        """End what has missed a limit, if the engine has not done so."""
        stream = self._open.get(request_id)
        if stream is None:
            return
        for event in stream.output.missed(name):
            stream.feed(event)
        if stream.output.finished:
            self.abandon(request_id)

    def abandon(self, request_id: str) -> None:
        """Forget a stream that has no reader any more, and abort its request in the engine."""
        self._forget(request_id)
        self._send(AbortRequest(request_id))

    def dispatch(self, events: list[TokenEvent]) -> None:
        """Hand the events of a step to their streams."""
        for event in events:
            stream = self._open.get(event.request_id)
            if stream is None:  # aborted, or ended by a stop string before the core knew
                continue
            stream.feed(event)
            if stream.output.finished:
                self._forget(event.request_id)

    async def end(self, grace_s: float) -> None:
        """Wait up to ``grace_s`` seconds for the streams to end by themselves, then abort the rest."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace_s)
        for stream in list(self._open.values()):
            await stream.abort()

    async def wait_for_adapter(self, adapter: Adapter, timeout_s: float) -> int:
        """Wait until no stream uses ``adapter``; return how many still do after ``timeout_s`` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._num_using(adapter):
                    self._left.clear()
                    await self._left.wait()
        return self._num_using(adapter)

    def _num_using(self, adapter: Adapter) -> int:
        return sum(stream.adapter == adapter for stream in self._open.values())

    def fail(self, error: str) -> None:
        """End every stream: the engine is dead."""
        for stream in list(self._open.values()):
            stream.fail(error, "dead")
        self._open.clear()
        self._left.set()
        self._idle.set()

    def _forget(self, request_id: str) -> None:
        stream = self._open.pop(request_id, None)
        for timer in () if stream is None else stream.timers:
            timer.cancel()
        self._left.set()
        if not self._open:
            self._idle.set()
