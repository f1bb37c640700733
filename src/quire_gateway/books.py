"""`Books`: the ledger of one gateway, and the journal of what the ledger has no row of yet.

A request takes a slot of the journal before a backend gets it, and its row keeps a slot until the database or the spool
has it. While there is no free slot, requests are refused: none is served unbooked.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from quire.errors import ConfigError
from quire.http.account import Used
from quire.http.refusals import HttpError, busy
from quire.metrics.log import Log
from quire_gateway.config import GatewayConfig
from quire_gateway.exchange import Exchange
from quire_gateway.fleet import Backend
from quire_gateway.journal import FIRST_SLOTS, SLOT_BYTES, Journal
from quire_gateway.ledger import Ledger
from quire_gateway.ledger_database import open_database
from quire_gateway.ledger_row import UNSETTLED, Row
from quire_gateway.quotas import Usage
from quire_gateway.rows import output_so_far, price_of, row_of, row_of_record

SPOOL_SUFFIX = ".spool"
JOURNAL_SUFFIX = ".journal"
RETRY_AFTER_S = 2
log = Log("ledger")


class Books:
    """Books every request of a gateway. Without a ledger in the configuration it keeps nothing."""

    def __init__(self, config: GatewayConfig) -> None:
        """Open the journal and the ledger.

        Raises:
            ConfigError: one of their files cannot be opened, or has no room.
        """
        self._config = config
        self._ledger: Ledger | None = None
        self._journal: Journal | None = None
        self._is_full = False
        self.num_refused = 0  # requests that were refused since the journal was full
        self.num_left_out = 0  # rows of requests that were refused meanwhile, which used nothing
        if (url := config.server.ledger) is None:
            return
        spool = Path(config.server.ledger_spool or _beside(url))
        try:
            self._journal = Journal(spool.with_suffix(JOURNAL_SUFFIX))
        except OSError as error:
            path, need = spool.with_suffix(JOURNAL_SUFFIX), FIRST_SLOTS * SLOT_BYTES >> 10
            raise ConfigError(
                f"The ledger's journal {path} cannot be made: {error.strerror or error} (it needs {need} KiB). Make "
                "room, or give ledger_spool a path on another disk.",
                param="ledger_spool",
            ) from None
        try:
            self._ledger = Ledger(open_database(url), spool, self._journal.free)
        except ConfigError:
            self._journal.close()
            raise

    @property
    def is_kept(self) -> bool:
        return self._ledger is not None

    @property
    def ledger_id(self) -> str:
        """The id of the ledger; empty where there is none, and until a database that is away has told it."""
        return self._ledger.id if self._ledger is not None else ""

    @property
    def num_waiting(self) -> int:
        """Rows that neither the database nor the spool has."""
        return self._ledger.num_waiting if self._ledger is not None else 0

    def check(self) -> None:
        """Raise `HttpError` (503) while no further request can be booked."""
        if self._journal is not None and not self._journal.has_room():
            raise self._full()
        if self._is_full:
            log.info("journal_has_room")
            self._is_full = False

    def begun(self, exchange: Exchange, now: float) -> None:
        """A backend gets the request: from now on it is booked even if this process is killed.

        Raises:
            HttpError: 503, there is no room to book it.
        """
        if self._journal is not None:
            used = Usage(exchange.reserved.input_tokens)
            slot = self._put(exchange, row_of(exchange, now, UNSETTLED, used))
            if slot is None:
                raise self._full()
            exchange.journal_slot = slot

    def relayed(self, exchange: Exchange) -> None:
        """More of the answer has come."""
        if exchange.journal_slot is not None and self._journal is not None:
            self._journal.count(exchange.journal_slot, output_so_far(exchange))

    def ended(self, exchange: Exchange, now: float, used: Usage | None) -> None:
        """Write the row of a request that has ended; ``used``: None for what is no answer."""
        if self._ledger is None:
            return
        row = row_of(exchange, now, exchange.outcome, used or Usage())
        slot = self._put(exchange, row)
        if slot is None and used is None:
            self.num_left_out += 1  # a refusal, and the disk is full: such rows may be without end
        else:
            self._ledger.record(row, slot)

    def _put(self, exchange: Exchange, row: Row) -> int | None:
        assert self._journal is not None
        limited = exchange.targets[0].model if exchange.targets else ""
        return self._journal.put(exchange.journal_slot, row, limited)

    def _full(self) -> HttpError:
        if not self._is_full:
            log.error("journal_full", rows=self.num_waiting)
        self._is_full = True
        self.num_refused += 1
        text = "The gateway has no room to book the request, and serves none that is not booked."
        return HttpError(busy(text, "ledger_full", RETRY_AFTER_S))

    def found(self) -> list[tuple[int, Row, str]]:
        """Return what an earlier process has left in the journal: slot, row, and model of the limits."""
        return self._journal.found if self._journal is not None else []

    def forget(self, slot: int | None) -> None:
        """A request of an earlier process needs no row of its own."""
        if slot is not None and self._journal is not None:
            self._journal.free(slot)

    def book_row(self, row: Row, slot: int | None = None) -> None:
        """Write a row at its model's price."""
        if self._ledger is not None:
            price = price_of(self._config.prices, row.model).nano(
                row.prompt_tokens, row.cached_tokens, row.output_tokens
            )
            self._ledger.record(replace(row, price_nano=price), slot)

    def book(self, used: Used, backend: Backend) -> None:
        """Book what a replica knows of a request; a row of its own gateway wins."""
        self.book_row(row_of_record(used, backend))

    def close(self) -> None:
        """Write what waits; blocks. What no disk takes stays in the journal."""
        if self._ledger is not None:
            self._ledger.close()
        if self._journal is not None:
            self._journal.close()


def _beside(ledger: str) -> str:
    """Return the spool's path for a ledger: beside an SQLite file, in the working folder for a server."""
    is_file = "://" not in ledger or ledger.startswith("sqlite:")
    return (ledger.removeprefix("sqlite://") if is_file else "quire-ledger") + SPOOL_SUFFIX
