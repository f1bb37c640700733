"""`RequestStream`: the chunks of one request, as an async iterator that gives up its request when it is left."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable

from quire.engine.build import EngineInfo
from quire.engine.client import EngineClient
from quire.engine.inbox import AbortRequest, Call, Message, Reply
from quire.engine.output import OutputChunk, RequestOutputState, merge
from quire.errors import CapacityError, ConfigError, EngineDeadError, QuireError
from quire.metrics.log import Log
from quire.request import Adapter, FinishReason, TokenEvent

log = Log("frontend")


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


class OpenStreams:
    """From `add` until every sample has its terminal chunk. Belongs to one event loop."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._open: dict[str, RequestStream] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._left = asyncio.Event()  # one has ended

    def __len__(self) -> int:
        return len(self._open)

    def add(self, request_id: str, stream: RequestStream) -> None:
        self._open[request_id] = stream
        self._idle.clear()

    def give_up(self, request_id: str) -> None:
        """Nobody reads it any more: take it out of the engine too."""
        self._forget(request_id)
        self._send(AbortRequest(request_id))

    def dispatch(self, events: list[TokenEvent]) -> None:
        """Hand a step's events to their streams."""
        for event in events:
            stream = self._open.get(event.request_id)
            if stream is None:  # aborted or ended by a stop string; the core did not know yet
                continue
            stream.feed(event)
            if stream.output.finished:
                self._forget(event.request_id)

    async def end(self, grace_s: float) -> None:
        """Wait up to ``grace_s`` seconds for all to end by themselves, then abort the rest."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace_s)
        for stream in list(self._open.values()):
            await stream.abort()

    async def wait_for_adapter(self, adapter: Adapter, timeout_s: float) -> int:
        """Wait until nobody uses ``adapter``; return how many still do after ``timeout_s`` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._num_using(adapter):
                    self._left.clear()
                    await self._left.wait()
        return self._num_using(adapter)

    def _num_using(self, adapter: Adapter) -> int:
        return sum(stream.adapter == adapter for stream in self._open.values())

    def fail(self, error: str) -> None:
        """The engine is dead: everything ends with that."""
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
    """Calls ``on_ready`` once, ``on_events`` for each step, ``on_replies`` where calls were answered, ``on_death`` at
    most once, but not after `stop`.

    All calls are made in the loop's thread.
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
        """Close the client, which wakes the thread, and wait for the thread's end."""
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
        except Exception as error:  # a bug; the streams have to end all the same
            log.exception("pump_failed")
            self._die(EngineDeadError(f"{type(error).__name__}: {error}"))

    def _die(self, error: QuireError) -> None:
        if not self._stopping:
            self._post(self._on_death, error)

    def _post(self, call: Callable[..., None], argument: object) -> None:
        # A loop that was closed meanwhile has nobody left to tell.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, argument)


TIMEOUT_S = 30.0  # an engine answers between two steps; one that died never does


class Calls:
    """Sends calls and hands out their answers. ``send`` as in `EngineClient`."""

    def __init__(self, send: Callable[[Message], None], *, timeout_s: float = TIMEOUT_S) -> None:
        self._send = send
        self._timeout_s = timeout_s
        self._waiting: dict[str, asyncio.Future[Reply]] = {}
        self._ids = itertools.count()

    async def ask(self, make: Callable[[str], Call]) -> Reply:
        """Send the call that ``make`` builds around an id, and wait for its answer.

        Raises:
            ConfigError: the core refused; `param` names the setting, and nothing has changed.
            CapacityError: no answer in time: the engine is being restarted, or one step takes very long (503).
        """
        call_id = str(next(self._ids))
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = future
        try:
            self._send(make(call_id))
            reply = await asyncio.wait_for(future, self._timeout_s)
        except TimeoutError:
            text = f"The engine did not answer within {self._timeout_s:g} s; whether it obeyed is not known."
            raise CapacityError(text, retryable=True) from None
        finally:
            del self._waiting[call_id]
        if reply.error is not None:
            raise ConfigError(reply.error, param=reply.param)
        return reply

    def answered(self, replies: list[Reply]) -> None:
        """Hand out answers; those that nobody waits for any more are dropped."""
        for reply in replies:
            future = self._waiting.get(reply.call_id)
            if future is not None and not future.done():
                future.set_result(reply)

    def fail(self, error: QuireError) -> None:
        """The engine is dead: nobody will answer."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
