"""`Books`: the ledger of one gateway, and the journal of what the ledger has no row of yet.

A request takes a slot of the journal before a backend gets it, and its row keeps a slot until the database or the spool
has it. While there is no free slot, requests are refused: none is served unbooked.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric

from quire.clock import RETRY_S
from quire.errors import ConfigError
from quire.http.account import Used
from quire.http.refusals import HttpError, busy
from quire.metrics.log import Log
from quire_gateway.config import GatewayConfig
from quire_gateway.exchange import Exchange
from quire_gateway.journal import FIRST_SLOTS, SLOT_BYTES, Journal
from quire_gateway.ledger import Ledger
from quire_gateway.ledger_database import open_database
from quire_gateway.ledger_row import UNSETTLED, Row
from quire_gateway.metrics import counter
from quire_gateway.patience import FLUSH_S
from quire_gateway.prices import find_price
from quire_gateway.quotas import Usage
from quire_gateway.stage import Stage
from quire_gateway.used import billed_usage, meets, output_so_far

SPOOL_SUFFIX = ".spool"
JOURNAL_SUFFIX = ".journal"
RETRY_AFTER_S = math.ceil(RETRY_S + FLUSH_S)  # the ledger has tried again then
log = Log("ledger")


class Bookkeeping(Stage):
    """Has every request booked that a backend gets, from the moment that it gets it."""

    def __init__(self, config: GatewayConfig, now: Callable[[], float]) -> None:
        self._config = config
        self._now = now
        self._books: Books | None = None
        self._slots: dict[Exchange, int] = {}  # requests that a backend has, and where the journal has them

    @property
    def books(self) -> Books:
        assert self._books is not None, "the gateway has not been started"
        return self._books

    def start(self) -> None:
        """Raises `ConfigError`: the books cannot be opened."""
        self._books = Books(self._config)

    async def close(self) -> None:
        await asyncio.to_thread(self.books.close)

    def metrics(self) -> Iterable[Metric]:
        waiting = GaugeMetricFamily("quire:gateway_ledger_rows_waiting", "Rows that no disk has taken yet.")
        waiting.add_metric([], self.books.num_waiting)
        refused: dict[tuple[str, ...], float] = {(): self.books.num_refused}
        text = "Requests refused since no more could be booked."
        return waiting, counter("quire:gateway_ledger_refused", text, (), refused)

    async def admit(self, exchange: Exchange, model: str) -> None:
        self.books.check()

    def begun(self, exchange: Exchange) -> None:
        """A backend gets the request: from now on it is booked even if this process is killed.

        Raises:
            HttpError: 503, there is no room to book it.
        """
        used = Usage(exchange.reserved.input_tokens)
        row = Row.from_exchange(exchange, self._now(), UNSETTLED, used)
        self._slots[exchange] = self.books.begin(self._slots.get(exchange), row, _limited(exchange))

    def relayed(self, exchange: Exchange) -> None:
        self.books.count(self._slots[exchange], output_so_far(exchange))

    async def after(self, exchange: Exchange, now: float) -> None:
        """Write the row. It comes before the limits: what the journal still has as running can be settled yet."""
        slot = self._slots.pop(exchange, None)
        if exchange.request is None:
            return
        used, slo = billed_usage(exchange, self._config.prices), self._config.slo
        met_slo = slo is not None and meets(slo, exchange, now)
        row = Row.from_exchange(exchange, now, exchange.outcome, used or Usage(), met_slo=met_slo)
        self.books.end(slot, row, _limited(exchange), is_answer=used is not None)


def _limited(exchange: Exchange) -> str:
    """Return the model whose limits hold for a request."""
    return exchange.targets[0].model if exchange.targets else ""


class Books:
    """The ledger and its journal."""

    def __init__(self, config: GatewayConfig) -> None:
        """Open the journal and the ledger.

        Raises:
            ConfigError: one of their files cannot be opened, or has no room.
        """
        self._prices = config.prices
        self._is_full = False
        self.num_refused = 0  # requests that were refused since the journal was full
        self.num_left_out = 0  # rows of requests that were refused meanwhile, which used nothing
        url = config.server.ledger
        assert url is not None
        spool = Path(config.server.ledger_spool or _beside(url))
        try:
            self.journal = Journal(spool.with_suffix(JOURNAL_SUFFIX))
        except OSError as error:
            path, need = spool.with_suffix(JOURNAL_SUFFIX), FIRST_SLOTS * SLOT_BYTES >> 10
            raise ConfigError(
                f"The ledger's journal {path} cannot be made: {error.strerror or error} (it needs {need} KiB). Make "
                "room, or give ledger_spool a path on another disk.",
                param="ledger_spool",
            ) from None
        try:
            self.ledger = Ledger(open_database(url), spool, self.journal.free)
        except ConfigError:
            self.journal.close()
            raise

    @property
    def ledger_id(self) -> str:
        """The id of the ledger; empty until a database that is away has told it."""
        return self.ledger.id

    @property
    def num_waiting(self) -> int:
        """Rows that neither the database nor the spool has."""
        return self.ledger.num_waiting

    def check(self) -> None:
        """Raise `HttpError` (503) while no further request can be booked."""
        if not self.journal.has_room():
            raise self._full()
        if self._is_full:
            log.info("journal_has_room")
            self._is_full = False

    def begin(self, slot: int | None, row: Row, limited: str) -> int:
        """Note a request that runs, in place of ``slot``, and return its slot. ``limited``: see `Journal.put`.

        Raises:
            HttpError: 503, there is no room.
        """
        taken = self.journal.put(slot, row, limited)
        if taken is None:
            raise self._full()
        return taken

    def count(self, slot: int, num_tokens: int) -> None:
        """``num_tokens`` of the answer have come."""
        self.journal.count(slot, num_tokens)

    def end(self, slot: int | None, row: Row, limited: str, *, is_answer: bool) -> None:
        """Write the row of a request that has ended."""
        taken = self.journal.put(slot, row, limited)
        if taken is None and not is_answer:
            self.num_left_out += 1  # a refusal, and the disk is full: such rows may be without end
        else:
            self.ledger.record(row, taken)

    def _full(self) -> HttpError:
        if not self._is_full:
            log.error("journal_full", rows=self.num_waiting)
        self._is_full = True
        self.num_refused += 1
        text = "The gateway has no room to book the request, and serves none that is not booked."
        return HttpError(busy(text, "ledger_full", RETRY_AFTER_S))

    def inherited(self) -> list[tuple[int, Row, str]]:
        """Return what an earlier process has left in the journal: slot, row, and model of the limits."""
        return self.journal.inherited

    def forget(self, slot: int | None) -> None:
        """A request of an earlier process needs no row of its own."""
        if slot is not None:
            self.journal.free(slot)

    def book_row(self, row: Row, slot: int | None = None) -> None:
        """Write a row at its model's price."""
        price = find_price(self._prices, row.model).nano(
            row.prompt_tokens, row.cached_tokens, row.output_tokens
        )
        self.ledger.record(replace(row, price_nano=price), slot)

    def book(self, used: Used, backend: str) -> None:
        """Book what a replica knows of a request; a row of its own gateway wins."""
        self.book_row(Row.from_record(used, backend))

    def close(self) -> None:
        """Write what waits; blocks. What no disk takes stays in the journal."""
        self.ledger.close()
        self.journal.close()


def _beside(ledger: str) -> str:
    """Return the spool's path for a ledger: beside an SQLite file, in the working folder for a server."""
    is_file = "://" not in ledger or ledger.startswith("sqlite:")
    return (ledger.removeprefix("sqlite://") if is_file else "quire-ledger") + SPOOL_SUFFIX
