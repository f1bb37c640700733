"""`OpenStreams`: the requests in flight as the event loop knows them, by the id that the core uses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from quire.engine.inbox import AbortRequest, Message
from quire.engine.stream import RequestStream
from quire.request import Adapter, TokenEvent


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
