"""`Ledger` and its `Spool`: one row per request, written in batches off the request's path.

A row's key is the request's id, so a row that is written twice counts once. Rows wait at most `FLUSH_S` in memory.
While the database does not take them they go to a spool beside it, an SQLite file of the same table, and from there to
the database once it is back, also after a restart. While neither takes them, as on a full disk, they stay in memory and
in their slots of the journal, which the gateway serves no request without.
"""

from __future__ import annotations

import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from quire.clock import RETRY_S
from quire.errors import ConfigError
from quire.metrics.log import Log
from quire_gateway.ledger_database import COLUMNS, Database, Sqlite, ledger_identity
from quire_gateway.ledger_row import Row
from quire_gateway.patience import FLUSH_S

BATCH_ROWS = 500
log = Log("ledger")


class Ledger:
    """Takes rows without waiting; a thread of its own writes them."""

    def __init__(
        self, database: Database, spool: Path, on_stored: Callable[[int], None] = lambda slot: None
    ) -> None:
        """``on_stored`` is called, in the ledger's thread, with the slot of each row that is in a database.

        Raises:
            ConfigError: the spool of an earlier process, or the database's file, cannot be used.
        """
        self._on_stored = on_stored
        self._database = database
        try:
            self._spool = Spool(spool)
            self.id = ledger_identity(database) if isinstance(database, Sqlite) else ""
        except sqlite3.Error as error:
            database.close()
            raise ConfigError(f"The ledger cannot be used: {error}.", param="ledger") from None
        self._rows: deque[tuple[Row, int | None]] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._is_down = False
        self._is_full = False
        self._thread = threading.Thread(target=self._write, name="quire-ledger", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Rows that are in memory alone."""
        return len(self._rows)

    @property
    def is_spooling(self) -> bool:
        return self._is_down

    def record(self, row: Row, slot: int | None = None) -> None:
        """Take a row; ``slot``: where the journal holds it."""
        self._rows.append((row, slot))
        if len(self._rows) >= BATCH_ROWS:
            self._wake.set()

    def close(self) -> None:
        """Write what waits, to the database or to the spool, and stop."""
        self._closing = True
        self._wake.set()
        self._thread.join()
        self._database.close()
        self._spool.close()

    def _write(self) -> None:
        wait_s = 0.0
        while True:
            self._wake.wait(FLUSH_S)
            self._wake.clear()
            closing = self._closing
            wait_s = max(0.0, wait_s - FLUSH_S)
            batch = [self._rows[i][0] for i in range(min(len(self._rows), 10 * BATCH_ROWS))]
            try_database, is_stored = wait_s == 0.0 or closing, True
            if batch or (self._spool.has_rows and try_database) or not self.id:
                in_database, is_stored = self._store(batch, try_database=try_database)
                if not in_database:
                    wait_s = wait_s or RETRY_S
                for _ in batch if is_stored else ():
                    if (slot := self._rows.popleft()[1]) is not None:
                        self._on_stored(slot)
            if closing and not is_stored:
                log.error(
                    "ledger_rows_wait",
                    rows=len(self._rows),
                    hint="they are in the journal for the next start",
                )
            if closing and not (self._rows and is_stored):
                return

    def _store(self, batch: Sequence[Row], *, try_database: bool) -> tuple[bool, bool]:
        """Write to the database, after what the spool holds; to the spool if that fails.

        Returns whether the database took the rows, and whether either did.
        """
        if try_database:
            try:
                self.id = self.id or ledger_identity(self._database)
                self._spool.empty(self._database)
                if batch:
                    self._database.insert(batch)
            except (OSError, sqlite3.Error) as error:
                if not self._is_down:
                    log.warning("ledger_gone", error=str(error), spool=str(self._spool.path))
                self._is_down = True
            else:
                if self._is_down:
                    log.info("ledger_back")
                self._is_down = self._is_full = False
                return True, True
        if batch:
            try:
                self._spool.insert(batch)
            except (OSError, sqlite3.Error) as error:
                if not self._is_full:
                    log.error(
                        "ledger_full", rows=len(batch), error=str(error), hint="rows wait in the journal"
                    )
                self._is_full = True
                return False, False
            self._is_full = False
        return False, True


class Spool:
    """Rows that wait for the database, in an SQLite file with the ledger's table, which exists while it has any."""

    def __init__(self, path: Path) -> None:
        """Raises `sqlite3.Error`: the file of an earlier process cannot be used."""
        self.path = path
        self._file: Sqlite | None = Sqlite(path) if path.exists() else None

    @property
    def has_rows(self) -> bool:
        return self._file is not None

    def insert(self, rows: Sequence[Row]) -> None:
        """Raises `OSError` or `sqlite3.Error`: the file does not take them."""
        if self._file is None:
            self._file = Sqlite(self.path)
        self._file.insert(rows)

    def empty(self, database: Database) -> None:
        """Move all rows to ``database``, which counts a row once that it gets twice, and remove the file."""
        while self._file is not None:
            values = self._file.query(f"SELECT {', '.join(COLUMNS)} FROM quire_ledger LIMIT {BATCH_ROWS}")
            if not values:
                self.close()
                for end in ("", "-wal", "-shm"):
                    self.path.with_name(self.path.name + end).unlink(missing_ok=True)
                return
            database.insert([Row(*row) for row in values])
            marks = ", ".join("?" * len(values))
            ids = [row[0] for row in values]
            self._file.query(f"DELETE FROM quire_ledger WHERE request_id IN ({marks})", ids)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
