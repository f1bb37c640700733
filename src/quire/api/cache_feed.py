"""`CacheFeed`: which blocks the engine's prefix cache has, as a stream for gateways (``GET /gateway/cache``).

A message is a head (bytes of the payload, kind, number) and a payload of `quire.cache.events.pack`:

    SNAPSHOT  all blocks that there are; each stream begins with one
    EVENTS    blocks that came and went since the message before
    BEAT      nothing happened for `BEAT_S`

The numbers of one stream rise by one. A reader that misses one, or is too slow, begins a new stream. The engine is
asked for its events only while a gateway listens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import partial

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from quire.clock import BEAT_S
from quire.engine.frontend import Frontend
from quire.engine.messages import TakeCacheEvents
from quire.errors import QuireError
from quire.http.account import check_gateway_key
from quire.http.cache_messages import BEAT, EVENTS, SILENCE_S, SNAPSHOT, message
from quire.metrics.log import Log

EVERY_S = 0.1
_MAX_WAITING = int(SILENCE_S / EVERY_S)  # messages of a reader that is slow
log = Log("api")


class CacheFeed:
    """The readers of one engine's cache events."""

    def __init__(self, frontend: Frontend, gateway_key: str | None) -> None:
        self._frontend = frontend
        self._key = gateway_key
        self._readers: set[asyncio.Queue[tuple[int, bytes]]] = set()
        self._has_joined = False  # a reader, which needs a snapshot
        self._task: asyncio.Task[None] | None = None

    async def show(self, request: Request) -> Response:
        """The stream."""
        check_gateway_key(request.scope, self._key)
        return StreamingResponse(self._messages(), media_type="application/octet-stream")

    async def _messages(self) -> AsyncGenerator[bytes, None]:
        queue: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue(_MAX_WAITING)
        self._readers.add(queue)
        self._has_joined = True
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._poll())
        number = 0
        try:
            while queue in self._readers or not queue.empty():
                try:
                    kind, payload = await asyncio.wait_for(queue.get(), BEAT_S)
                except TimeoutError:
                    kind, payload = BEAT, b""
                # What comes before its snapshot says nothing to a reader.
                if number or kind == SNAPSHOT:
                    number += 1
                    yield message(kind, number, payload)
        finally:
            self._readers.discard(queue)

    async def _poll(self) -> None:
        """Ask the engine until no reader is left, or the server takes no more requests."""
        restarts = self._frontend.health().num_restarts
        while self._readers and self._frontend.state == "ready":
            before, restarts = restarts, self._frontend.health().num_restarts
            snapshot, self._has_joined = self._has_joined or restarts != before, False
            try:
                reply = await self._frontend.call(partial(TakeCacheEvents, snapshot=snapshot))
            except QuireError as error:  # a restart: the next engine begins with an empty cache
                log.debug("cache_events_not_read", error=str(error))
                self._has_joined = True
            else:
                kind = SNAPSHOT if reply.values["snapshot"] else EVENTS
                if reply.values["events"] or kind == SNAPSHOT:
                    self._tell(kind, reply.values["events"])
            await asyncio.sleep(EVERY_S)
        self._readers.clear()

    def _tell(self, kind: int, payload: bytes) -> None:
        for queue in list(self._readers):
            if queue.full():
                self._readers.discard(queue)
            else:
                queue.put_nowait((kind, payload))
