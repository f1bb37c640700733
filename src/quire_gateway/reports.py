"""`Reports`: reads the cache events of the replicas (``GET /gateway/cache``) into the router's index.

A stream begins with a snapshot. It is begun anew after an error, after a message that is missing, and when the replica
has been away; what is known of the replica stays until the next snapshot, or until it is not ready.
"""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import Callable

from quire.cache.events import EVENT_BYTES, SHORT_HASH_BYTES, unpack
from quire.http.cache_messages import (
    BEAT,
    BLOCKS_HEADER,
    CACHE_PATH,
    PIECES_HEADER,
    SILENCE_S,
    SNAPSHOT,
    messages,
)
from quire.metrics.log import Log
from quire_gateway.exchange import Exchange
from quire_gateway.fleet import FLEET_LOOK_S, Backend, Fleet
from quire_gateway.patience import lasting
from quire_gateway.sending import Opened, Outgoing
from quire_gateway.stage import Stage
from quire_gateway.upstream import BackendFailed, Upstream, closing, failures

_AT_ONCE = 2_000  # events that are taken in between two turns of the other tasks
log = Log("gateway")


class Reports(Stage):
    """One task for each ready replica of Quire. Each answer tells the blocks of its prompt's pieces, too."""

    def __init__(
        self,
        fleet: Fleet,
        key_of: Callable[[Backend], str | None],
        upstream: Callable[[], Upstream],
        piece_bytes: int,
    ) -> None:
        self._fleet = fleet
        self._key_of = key_of
        self._upstream = upstream
        self._piece_bytes = piece_bytes
        self._tasks: dict[Backend, asyncio.Task[None]] = {}
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._watching = asyncio.create_task(self._watch())

    def prepare(self, outgoing: Outgoing) -> None:
        """Have a replica tell the blocks of the prompt's pieces."""
        placed = outgoing.placed
        if self._key_of(placed.backend) is not None and placed.target.model in placed.backend.fingerprints:
            outgoing.headers.append((PIECES_HEADER, str(self._piece_bytes)))

    def answered(self, exchange: Exchange, opened: Opened) -> None:
        """Take what an answer says of the blocks of its prompt's pieces."""
        names, encoded = self._fleet.router.prefixes.names, opened.response.headers.get(BLOCKS_HEADER)
        if encoded is None or names is None:
            return
        try:
            hashes = b64decode(encoded, validate=True)
        except ValueError:
            return
        short = [hashes[at : at + SHORT_HASH_BYTES] for at in range(0, len(hashes), SHORT_HASH_BYTES)]
        names.learn(exchange.attempts.chain, short)

    async def close(self) -> None:
        tasks = [*self._tasks.values(), *([self._watching] if self._watching is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            present = set(self._fleet)
            for backend in present:
                is_replica = backend.is_ready and backend.fingerprints and self._key_of(backend) is not None
                task = self._tasks.get(backend)
                if is_replica and (task is None or task.done()):
                    self._tasks[backend] = asyncio.create_task(self._read(backend))
                elif not backend.is_ready and task is not None:
                    self._tasks.pop(backend).cancel()
                    self._fleet.router.prefixes.forget_report(backend.number)
            for backend in self._tasks.keys() - present:  # the router has forgotten it
                self._tasks.pop(backend).cancel()
            await asyncio.sleep(FLEET_LOOK_S)

    async def _read(self, backend: Backend) -> None:
        """Read one stream to its end."""
        headers = [("x-quire-gateway-key", self._key_of(backend) or "")]
        if backend.args.api_key is not None:
            headers.append(("authorization", f"Bearer {backend.args.api_key}"))
        try:
            with failures():
                async with lasting(SILENCE_S) as limit:
                    response = await self._upstream().open("GET", backend.url + CACHE_PATH, headers, None)
                    with closing(response):
                        if response.status != 200:
                            raise BackendFailed("status", f"{CACHE_PATH} answered {response.status}.")
                        async for kind, payload in messages(response.content.iter_any()):
                            limit.renew(SILENCE_S)
                            if kind != BEAT:
                                await self._take(backend, payload, is_snapshot=kind == SNAPSHOT)
        except BackendFailed as error:
            log.debug("cache_events_lost", backend=backend.name, error=str(error))

    async def _take(self, backend: Backend, payload: bytes, *, is_snapshot: bool) -> None:
        prefixes = self._fleet.router.prefixes
        if is_snapshot:
            prefixes.forget_report(backend.number)
        for start in range(0, len(payload), _AT_ONCE * EVENT_BYTES):
            if start:
                await asyncio.sleep(0)
            prefixes.report(backend.number, unpack(payload[start : start + _AT_ONCE * EVENT_BYTES]))
