"""`Booking`: books from the replicas what a gateway that was killed did not.

A replica of Quire keeps what each request has used for ten minutes (``GET /gateway/usage``). A gateway that starts
reads these records at several times after each replica is ready, since a request may end a while after its gateway
did, and gives the ledger a row of each. The row's key is the request's id, and a row of the request's own gateway
replaces one of these, so nothing counts twice however many gateways there are.

A live gateway asks for the record of a stream that broke or whose client left: its answer does not say what it used.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from quire.http.account import USAGE_PATH, UsedPage
from quire.metrics.log import Log
from quire_gateway.books import Books
from quire_gateway.exchange import Exchange
from quire_gateway.fleet import Backend, Fleet
from quire_gateway.ledger_row import UNSETTLED, Row
from quire_gateway.tenants import Tenants
from quire_gateway.upstream import BackendFailed, Upstream
from quire_gateway.usage import Usage

PASSES_S = (0.0, 1.0, 10.0)  # after the replica was first ready
PATIENCE_S = 60.0  # with a backend that does not become ready
ASK_S = (0.02, 0.05, 0.1, 0.2, 0.5)  # pauses before each question for a request that is about to end
_LOOK_S = 0.25
_TIMEOUT_S = 5.0
log = Log("ledger")


@dataclass(slots=True)
class _Reading:
    """How far the records of one replica have been read."""

    first_s: float  # of the loop's clock: it was ready
    num_passes: int = 0
    last: int = 0  # number of its last record
    since: float = 0.0  # Unix time of its start


class Booking:
    """Reads the records of the replicas in ``fleet``. ``key_of``: the key by which a replica knows this gateway."""

    def __init__(
        self, fleet: Fleet, key_of: Callable[[Backend], str | None], tenants: Tenants, books: Books
    ) -> None:
        self._fleet = fleet
        self._key_of = key_of
        self._tenants = tenants
        self._books = books
        # Requests that ran when an earlier process was killed: slot, row, model of the limits.
        self._running = {each[1].request_id: each for each in books.found() if each[1].outcome == UNSETTLED}
        self._upstream: Upstream | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, upstream: Upstream) -> None:
        """Read the records of an earlier process from now on."""
        self._upstream = upstream
        if self._books.is_kept:
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def settle(self, exchange: Exchange) -> None:
        """Give an exchange that ended without its usage the usage that its replica knows."""
        backend, target = exchange.backend, exchange.target
        if backend is None or target is None or exchange.outcome not in ("left", "broken"):
            return
        if target.model not in backend.fingerprints or self._key_of(backend) is None:
            return
        for pause_s in ASK_S:
            await asyncio.sleep(pause_s)
            try:
                page = await self._get(backend, f"id={exchange.ledger_id}")
            except BackendFailed:
                return
            if page.data:
                used = page.data[0]
                tokens = used.prompt_tokens, used.cached_tokens, used.output_tokens
                exchange.usage = Usage(*tokens, None, used.engine_s, used.kv_block_s)
                return

    async def _run(self) -> None:
        """Read each replica's records `PASSES_S` after it was first seen ready, each time from where it ended."""
        loop = asyncio.get_running_loop()
        begin_s, readings = loop.time(), dict[str, _Reading]()  # by URL
        await self._book_found()
        while True:
            for backend in self._fleet:
                if not backend.is_ready:
                    continue
                if not backend.fingerprints or self._key_of(backend) is None:
                    await self._conclude(backend.name, math.inf)
                    continue
                if not self._books.ledger_id:
                    continue  # its database is away
                reading = readings.setdefault(backend.url, _Reading(loop.time()))
                if reading.num_passes == len(PASSES_S):
                    continue
                if loop.time() < reading.first_s + PASSES_S[reading.num_passes]:
                    continue
                try:
                    await self._read(backend, reading)
                except BackendFailed as error:
                    log.debug("usage_not_read", backend=backend.name, error=str(error))
                    continue
                reading.num_passes += 1
                if reading.num_passes == len(PASSES_S):
                    await self._conclude(backend.name, reading.since)
            if loop.time() > begin_s + PATIENCE_S:
                await self._conclude(None, math.inf)
            await asyncio.sleep(_LOOK_S)

    async def _book_found(self) -> None:
        """Book the rows that an earlier process has not written."""
        for slot, row, limited in self._books.found():
            if row.outcome != UNSETTLED:
                self._books.book_row(row, slot)
                await self._tenants.charge(row, limited, if_held=True)

    async def _read(self, backend: Backend, reading: _Reading) -> None:
        """Book what a replica has behind its last record that was read, of requests of this ledger alone."""
        count, has_more = 0, True
        while has_more:
            page = await self._get(backend, f"after={reading.last}&ledger={self._books.ledger_id}")
            for used in page.data:
                found = self._running.pop(used.request_id, None)
                if found is None and used.ledger != self._books.ledger_id:
                    reading.last = used.number
                    continue
                self._books.book(used, backend)
                if found is not None:
                    slot, row, limited = found
                    tokens = used.prompt_tokens, used.cached_tokens, used.output_tokens
                    await self._charge(row, limited, tokens)
                    self._books.forget(slot)
                reading.last = used.number
            count, has_more, reading.since = count + len(page.data), page.has_more, page.since
        if count:
            log.info("usage_read", backend=backend.name, requests=count)

    async def _conclude(self, name: str | None, since: float) -> None:
        """Book the requests at backend ``name`` (None: at any) of which there is no record.

        A replica has a record of all that reached it after ``since``.
        """
        for slot, row, limited in [
            each for each in self._running.values() if name in (None, each[1].backend)
        ]:
            del self._running[row.request_id]
            if row.finished_at > since:
                await self._charge(row, limited, (0, 0, 0))
                self._books.forget(slot)
            else:
                await self._tenants.charge(row, limited)
                self._books.book_row(row, slot)

    async def _charge(self, row: Row, limited: str, tokens: tuple[int, int, int]) -> None:
        """Charge the budgets for a request with its prompt, cached and output tokens as the replica knows them."""
        prompt, cached, output = tokens
        used = replace(row, prompt_tokens=prompt, cached_tokens=cached, output_tokens=output)
        await self._tenants.charge(used, limited)

    async def _get(self, backend: Backend, query: str) -> UsedPage:
        assert self._upstream is not None
        key = self._key_of(backend)
        assert key is not None
        headers = [("x-quire-gateway-key", key)]
        url = f"{backend.url}{USAGE_PATH}?{query}"
        whole = await self._upstream.get(url, _TIMEOUT_S, backend.args.api_key, headers)
        if whole.status != 200:
            raise BackendFailed("status", f"{USAGE_PATH} answered {whole.status}.")
        try:
            return msgspec.json.decode(whole.body, type=UsedPage)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise BackendFailed("garbage", f"{USAGE_PATH} is no list of usage: {error}.") from error
