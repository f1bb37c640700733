"""The streams of requests on an event loop, and what feeds them.

RequestStream   the chunks of one request, as an async iterator; leaving it aborts the request
OpenStreams     the streams in flight, by the id that the core uses
EventPump       the thread that waits for an engine's events and hands them to the event loop
Calls           calls to the core that wait for their `Reply`
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable

from quire.engine.build import EngineInfo
from quire.engine.client import EngineClient
from quire.engine.core import AbortRequest, Call, Message, Reply
from quire.engine.output import OutputChunk, RequestOutputState, merge
from quire.errors import CapacityError, ConfigError, EngineDeadError, QuireError
from quire.metrics.log import Log
from quire.request import Adapter, FinishReason, TokenEvent

log = Log("frontend")


class RequestStream:
    """What `Frontend.submit` returns. Iterate over it once, or `collect` it; leaving it early aborts the request.

        async with contextlib.aclosing(await frontend.submit(prompt, sampling)) as stream:
            async for chunk in stream:
                ...

    Exactly one chunk of each of the n samples carries a ``finish_reason``; after the last of them the iteration ends.
    An engine error is a chunk with `FinishReason.ERROR`, not an exception (`quire.engine.output.error_of` makes one).
    Leaving early means break, an exception, cancellation or `aclose`. Belongs to the event loop's thread.
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
        self._abandon = abandon
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
        if len(self._chunks) == 1:
            return [self._chunks.popleft()]
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
        try:
            chunk = self.output.feed(event)
        except Exception as error:  # an error in one request's text must not end the other streams
            log.exception("output_failed", request_id=self.request_id)
            self._push(self.output.end(FinishReason.ERROR, f"{type(error).__name__}: {error}", "internal"))
            self._abandon()
            return
        if chunk is not None:
            self._push([chunk])

    def fail(self, error: str, error_kind: str) -> None:
        """End every open sample with an error (called by `OpenStreams`)."""
        self._push(self.output.end(FinishReason.ERROR, error, error_kind))

    def _push(self, chunks: list[OutputChunk]) -> None:
        self._chunks.extend(chunks)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


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

    def add(self, request_id: str, stream: RequestStream) -> None:
        self._open[request_id] = stream
        self._idle.clear()

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
        self._open.pop(request_id, None)
        self._left.set()
        if not self._open:
            self._idle.set()


class EventPump:
    """A thread that receives from the engine and calls back in the event loop's thread.

    ``on_ready`` is called once, ``on_events`` for each step that has events, ``on_replies`` when calls were answered,
    and ``on_death`` at most once, but not after `stop`.
    """

    def __init__(
        self,
        client: EngineClient,
        loop: asyncio.AbstractEventLoop,
        *,
        on_ready: Callable[[EngineInfo], None],
        on_events: Callable[[list[TokenEvent]], None],
        on_replies: Callable[[list[Reply]], None],
        on_death: Callable[[QuireError], None],
    ) -> None:
        self._client = client
        self._loop = loop
        self._on_ready = on_ready
        self._on_events = on_events
        self._on_replies = on_replies
        self._on_death = on_death
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="quire-events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        """Close the client, which wakes the thread, and wait for the thread to end."""
        self._stopping = True
        await asyncio.to_thread(self._client.close)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            self._post(self._on_ready, self._client.wait_ready())
            while not self._stopping:
                events = self._client.receive()
                if events:
                    self._post(self._on_events, events)
                if replies := self._client.replies():
                    self._post(self._on_replies, replies)
        except QuireError as error:
            self._die(error)
        except Exception as error:  # a bug, but the streams have to end
            log.exception("pump_failed")
            self._die(EngineDeadError(f"{type(error).__name__}: {error}"))

    def _die(self, error: QuireError) -> None:
        if not self._stopping:
            self._post(self._on_death, error)

    def _post(self, call: Callable[..., None], argument: object) -> None:
        # If the loop was closed meanwhile, there is nothing left to call.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, argument)


# An engine replies between two steps; one that died never does.
TIMEOUT_S = 30.0


class Calls:
    """Sends calls to the core and hands out the replies. ``send``: as in `EngineClient`. Belongs to one event loop."""

    def __init__(self, send: Callable[[Message], None], *, timeout_s: float = TIMEOUT_S) -> None:
        self._send = send
        self._timeout_s = timeout_s
        self._waiting: dict[str, asyncio.Future[Reply]] = {}
        self._ids = itertools.count()

    async def ask(self, make: Callable[[str], Call]) -> Reply:
        """Send the call that ``make`` builds with an id, and wait for its reply.

        Raises:
            ConfigError: the core rejected the call; `param` names the setting, and nothing has changed.
            CapacityError: no answer in time: the engine is being restarted, or one step takes very long (503).
        """
        call_id = str(next(self._ids))
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = future
        try:
            self._send(make(call_id))
            reply = await asyncio.wait_for(future, self._timeout_s)
        except TimeoutError:
            text = f"The engine did not answer within {self._timeout_s:g} s; whether the call took effect is not known."
            raise CapacityError(text, retryable=True) from None
        finally:
            del self._waiting[call_id]
        if reply.error is not None:
            raise ConfigError(reply.error, param=reply.param)
        return reply

    def answered(self, replies: list[Reply]) -> None:
        """Hand out replies. A reply whose caller has given up is dropped."""
        for reply in replies:
            future = self._waiting.get(reply.call_id)
            if future is not None and not future.done():
                future.set_result(reply)

    def fail(self, error: QuireError) -> None:
        """Fail every waiting call: the engine is dead."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
