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
from dataclasses import dataclass, replace

from quire.metrics.log import Log
from quire_gateway.books import Bookkeeping, Books
from quire_gateway.fleet import FLEET_LOOK_S, Backend, Fleet
from quire_gateway.ledger_row import UNSETTLED, Row
from quire_gateway.limits import LEASE_S
from quire_gateway.replica_usage import UsageReader
from quire_gateway.stage import Stage
from quire_gateway.tenants import Tenants
from quire_gateway.upstream import BackendFailed

PASSES_S = (0.0, 1.0, 10.0)  # after the replica was first ready
log = Log("ledger")


@dataclass(slots=True)
class _Reading:
    """How far the records of one replica have been read."""

    first_s: float  # of the loop's clock: it was ready
    num_passes: int = 0
    last: int = 0  # number of its last record
    since: float = 0.0  # Unix time of its start


class Booking(Stage):
    """Books what an earlier process of this gateway has not: from the journal, and from replicas' records."""

    def __init__(
        self, fleet: Fleet, reader: UsageReader, bookkeeping: Bookkeeping, tenants: Tenants | None
    ) -> None:
        """``tenants``: charges the budgets; None: there are none."""
        self._fleet = fleet
        self._reader = reader
        self._bookkeeping = bookkeeping
        self._tenants = tenants
        # Requests that ran when an earlier process was killed: slot, row, model of the limits.
        self._running: dict[str, tuple[int, Row, str]] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def _books(self) -> Books:
        return self._bookkeeping.books

    def start(self) -> None:
        """Read the records of an earlier process from now on."""
        self._running = {
            row[1].request_id: row for row in self._books.inherited() if row[1].outcome == UNSETTLED
        }
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        """Read each replica's records `PASSES_S` after it was first seen ready, each time from where it ended."""
        loop = asyncio.get_running_loop()
        begin_s, readings = loop.time(), dict[str, _Reading]()  # by URL
        await self._book_inherited()
        while True:
            for backend in self._fleet:
                if not backend.is_ready:
                    continue
                if not self._reader.tells(backend):
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
            if loop.time() > begin_s + LEASE_S:
                await self._conclude(None, math.inf)
            await asyncio.sleep(FLEET_LOOK_S)

    async def _book_inherited(self) -> None:
        """Book the rows that an earlier process has not written."""
        for slot, row, limited in self._books.inherited():
            if row.outcome != UNSETTLED:
                self._books.book_row(row, slot)
                await self._charge(row, limited, if_held=True)

    async def _read(self, backend: Backend, reading: _Reading) -> None:
        """Book what a replica has behind its last record that was read, of requests of this ledger alone."""
        count, has_more = 0, True
        while has_more:
            page = await self._reader.page(backend, f"after={reading.last}&ledger={self._books.ledger_id}")
            for used in page.data:
                run = self._running.pop(used.request_id, None)
                if run is None and used.ledger != self._books.ledger_id:
                    reading.last = used.number
                    continue
                self._books.book(used, backend.name)
                if run is not None:
                    slot, row, limited = run
                    await self._charge(
                        replace(
                            row,
                            prompt_tokens=used.prompt_tokens,
                            cached_tokens=used.cached_tokens,
                            output_tokens=used.output_tokens,
                        ),
                        limited,
                    )
                    self._books.forget(slot)
                reading.last = used.number
            count, has_more, reading.since = count + len(page.data), page.has_more, page.since
        if count:
            log.info("usage_read", backend=backend.name, requests=count)

    async def _conclude(self, name: str | None, since: float) -> None:
        """Book the requests at backend ``name`` (None: at any) of which there is no record.

        A replica has a record of all that reached it after ``since``.
        """
        for slot, row, limited in [run for run in self._running.values() if name in (None, run[1].backend)]:
            del self._running[row.request_id]
            if row.finished_at > since:
                nothing = replace(row, prompt_tokens=0, cached_tokens=0, output_tokens=0)
                await self._charge(nothing, limited)
                self._books.forget(slot)
            else:
                await self._charge(row, limited)
                self._books.book_row(row, slot)

    async def _charge(self, row: Row, limited: str, *, if_held: bool = False) -> None:
        """Charge the budgets for a request of an earlier process (see `Limits.recover`)."""
        if self._tenants is not None:
            await self._tenants.charge(row, limited, if_held=if_held)
