"""The ledger: one row per request, written in batches off the request's path; SQLite by default, PostgreSQL by URL.

A row's key is the request's id, so a row that is written twice counts once. Rows wait at most `FLUSH_S` in memory.
While the database does not take them they go to a spool beside it, an SQLite file of the same table, and from there to
the database once it is back, also after a restart.
"""

from __future__ import annotations

import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from quire.errors import ConfigError
from quire.extras import needs
from quire.metrics.log import Log

FLUSH_S = 0.1
BATCH_ROWS = 500
RETRY_S = 1.0  # between two attempts while the database does not answer
NANO = 1_000_000_000
RECOVERED = "recovered"  # outcome of a row that is made from a replica's record
UNSETTLED = "unsettled"  # outcome of a row that is made from what a killed gateway knew of a request that ran
log = Log("ledger")


@dataclass(frozen=True, slots=True)
class Row:
    """One request. Times in milliseconds; money in billionths of the currency."""

    request_id: str
    finished_at: float  # Unix time in seconds
    tenant: str
    key: str  # its name
    model: str
    backend: str
    endpoint: str
    outcome: str  # of an `Exchange`, `RECOVERED` or `UNSETTLED`
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_ms: float
    e2el_ms: float
    price_nano: int


@dataclass(frozen=True, slots=True)
class Price:
    """Money per million tokens of one model; cached input may cost less."""

    input: float = 0.0
    cached_input: float | None = None  # None: as input
    output: float = 0.0

    def nano(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> int:
        """Return the price of a request in billionths."""
        cached = self.input if self.cached_input is None else self.cached_input
        plain = prompt_tokens - cached_tokens
        return round((plain * self.input + cached_tokens * cached + output_tokens * self.output) * NANO / 1e6)


COLUMNS = tuple(each.name for each in fields(Row))
_TYPES = {"str": "TEXT NOT NULL", "int": "BIGINT NOT NULL", "float": "DOUBLE PRECISION NOT NULL"}
_CREATE = "CREATE TABLE IF NOT EXISTS quire_ledger ({}, PRIMARY KEY (request_id))".format(
    ", ".join(f"{each.name} {_TYPES[str(each.type)]}" for each in fields(Row))
)
_INDEX = "CREATE INDEX IF NOT EXISTS quire_ledger_time ON quire_ledger (finished_at)"
_UNSETTLED = f"COUNT(CASE WHEN outcome = '{UNSETTLED}' THEN 1 END)"
GROUPS = ("tenant", "key", "model", "backend", "endpoint", "outcome", "day", "month")
SUMS = ("prompt_tokens", "cached_tokens", "output_tokens", "price_nano")


class Database(Protocol):
    """Where rows are kept. All calls block; one thread at a time."""

    def insert(self, rows: Sequence[Row]) -> None: ...

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]: ...

    def close(self) -> None: ...


class Sqlite:
    """An SQLite file in WAL mode: a commit survives the end of the process, the last ones not a power failure."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._connection = sqlite3.connect(path, timeout=30.0, check_same_thread=False)
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=NORMAL")
        with self._connection:
            self._connection.execute(_CREATE)
            self._connection.execute(_INDEX)

    def insert(self, rows: Sequence[Row]) -> None:
        with self._connection:
            self._connection.executemany(_insert("?"), [astuple(row) for row in rows])

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._connection:
            return self._connection.execute(sql, values).fetchall()

    def close(self) -> None:
        self._connection.close()


class Postgres:
    """A PostgreSQL database by URL. Connects with the first call, and again after an error."""

    def __init__(self, url: str) -> None:
        with needs("postgres", "A ledger in PostgreSQL", param="ledger"):
            import psycopg
        self._psycopg = psycopg
        self._url = url
        self._connection: Any = None

    def _run(self, sql: str, batches: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
        try:
            if self._connection is None:
                self._connection = self._psycopg.connect(self._url, connect_timeout=3)
                with self._connection.transaction():
                    self._connection.execute(
                        "SELECT pg_advisory_xact_lock(7112233)"
                    )  # one gateway makes the table
                    self._connection.execute(_CREATE)
                    self._connection.execute(_INDEX)
            with self._connection.transaction(), self._connection.cursor() as cursor:
                if len(batches) == 1:
                    cursor.execute(sql, batches[0])
                else:
                    cursor.executemany(sql, batches)
                return cursor.fetchall() if cursor.description else []
        except self._psycopg.Error as error:
            self.close()
            raise OSError(str(error).strip()) from None

    def insert(self, rows: Sequence[Row]) -> None:
        # One order for all writers: two gateways that insert the same rows cannot deadlock.
        self._run(_insert("%s"), sorted(astuple(row) for row in rows))

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self._run(sql.replace("%", "%%").replace("?", "%s"), [values])

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


# A row replaces one that knows less of the request: the gateway's own before a replica's record (of several, the one
# with more output), and both before what is not settled.
_RANK = f"CASE {{}}.outcome WHEN '{UNSETTLED}' THEN 0 WHEN '{RECOVERED}' THEN 1 ELSE 2 END"
_ON_CONFLICT = (
    f"ON CONFLICT (request_id) DO UPDATE SET {', '.join(f'{each} = excluded.{each}' for each in COLUMNS[1:])} "
    f"WHERE {_RANK.format('quire_ledger')} < {_RANK.format('excluded')} OR quire_ledger.outcome = '{RECOVERED}' "
    f"AND excluded.outcome = '{RECOVERED}' AND quire_ledger.output_tokens < excluded.output_tokens"
)


def _insert(mark: str) -> str:
    names, marks = ", ".join(COLUMNS), ", ".join([mark] * len(COLUMNS))
    return f"INSERT INTO quire_ledger ({names}) VALUES ({marks}) {_ON_CONFLICT}"


def open_database(url: str) -> Database:
    """Open ``postgresql://…``, ``sqlite:///path`` or the path of an SQLite file.

    Raises:
        ConfigError: another scheme, or a file that cannot be opened.
    """
    scheme = urlsplit(url).scheme
    if scheme in ("postgres", "postgresql"):
        return Postgres(url)
    if scheme not in ("", "sqlite", "file"):
        raise ConfigError(
            f"ledger = {scheme}://… must be a path, sqlite:///PATH or postgresql://…", param="ledger"
        )
    path = Path(url.removeprefix("sqlite://")) if scheme == "sqlite" else Path(url)
    try:
        return Sqlite(path)
    except (sqlite3.Error, OSError) as error:
        raise ConfigError(f"The ledger {path} cannot be opened: {error}.", param="ledger") from None


class Ledger:
    """Takes rows without waiting; a thread of its own writes them."""

    def __init__(
        self, database: Database, spool: Path, on_stored: Callable[[int], None] = lambda slot: None
    ) -> None:
        """``on_stored`` is called, in the ledger's thread, with the slot of each row that is in a database."""
        self._on_stored = on_stored
        self._database = database
        self._spool_path = spool
        self._spool: Sqlite | None = Sqlite(spool) if spool.exists() else None
        self._rows: deque[tuple[Row, int | None]] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._is_down = False
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
        for each in (self._database, self._spool):
            if each is not None:
                each.close()

    def _write(self) -> None:
        wait_s = 0.0
        while True:
            self._wake.wait(FLUSH_S)
            self._wake.clear()
            closing = self._closing
            wait_s = max(0.0, wait_s - FLUSH_S)
            batch = [self._rows[i][0] for i in range(min(len(self._rows), 10 * BATCH_ROWS))]
            if batch or (self._spool is not None and wait_s == 0.0):
                if not self._store(batch, try_database=wait_s == 0.0):
                    wait_s = wait_s or RETRY_S
                for _ in batch:
                    if (slot := self._rows.popleft()[1]) is not None:
                        self._on_stored(slot)
            if closing and not self._rows:
                return

    def _store(self, batch: Sequence[Row], *, try_database: bool) -> bool:
        """Write to the database, after what the spool holds; to the spool if that fails. Returns which."""
        if try_database:
            try:
                self._empty_spool()
                if batch:
                    self._database.insert(batch)
            except (OSError, sqlite3.Error) as error:
                if not self._is_down:
                    log.warning("ledger_gone", error=str(error), spool=str(self._spool_path))
                self._is_down = True
            else:
                if self._is_down:
                    log.info("ledger_back")
                self._is_down = False
                return True
        if batch:
            try:
                if self._spool is None:
                    self._spool = Sqlite(self._spool_path)
                self._spool.insert(batch)
            except (OSError, sqlite3.Error) as error:
                log.error("ledger_rows_lost", rows=len(batch), error=str(error))
        return False

    def _empty_spool(self) -> None:
        while self._spool is not None:
            rows = self._spool.query(f"SELECT {', '.join(COLUMNS)} FROM quire_ledger LIMIT {BATCH_ROWS}")
            if not rows:
                self._spool.close()
                for end in ("", "-wal", "-shm"):
                    self._spool_path.with_name(self._spool_path.name + end).unlink(missing_ok=True)
                self._spool = None
                return
            self._database.insert([Row(*each) for each in rows])
            marks = ", ".join("?" * len(rows))
            self._spool.query(f"DELETE FROM quire_ledger WHERE request_id IN ({marks})", [r[0] for r in rows])


def report(
    database: Database, by: Sequence[str], since: datetime | None = None, until: datetime | None = None
) -> list[dict[str, Any]]:
    """Return a line per group with the number of requests, the sums of tokens and the price, sorted by group.

    ``unsettled``: requests among them that are counted by what a killed gateway knew of them.

    Raises:
        ConfigError: a name of ``by`` that is no group.
    """
    if unknown := [each for each in by if each not in GROUPS]:
        raise ConfigError(f"--by {unknown[0]!r} must be of {', '.join(GROUPS)}.", param="by")
    where = "finished_at >= ? AND finished_at < ?"
    bounds = (since.timestamp() if since else 0.0, until.timestamp() if until else 1e18)
    plain = [each for each in by if each not in ("day", "month")]
    # Days are groups of 86,400 s of Unix time, which both databases compute alike; months are added up here.
    days = ["CAST(floor(finished_at / 86400) AS BIGINT)"] if len(plain) < len(by) else []
    groups = ", ".join([*plain, *days])
    sums = ", ".join(f"CAST(SUM({each}) AS BIGINT)" for each in SUMS)
    found = database.query(
        f"SELECT {groups + ', ' if groups else ''}COUNT(*), {sums}, {_UNSETTLED} FROM quire_ledger WHERE {where}"
        + (f" GROUP BY {groups}" if groups else ""),
        bounds,
    )
    totals: dict[tuple[str, ...], list[int]] = {}
    for row in found:
        values = dict(zip(plain, row, strict=False))
        if days:
            date = datetime.fromtimestamp(row[len(plain)] * 86400, UTC)
            values |= {"day": f"{date:%Y-%m-%d}", "month": f"{date:%Y-%m}"}
        numbers = [int(each or 0) for each in row[len(plain) + len(days) :]]
        total = totals.setdefault(tuple(values[each] for each in by), [0] * len(numbers))
        total[:] = [a + b for a, b in zip(total, numbers, strict=True)]
    names = ("requests", *SUMS, "unsettled")
    return [
        dict(zip(by, group, strict=True)) | dict(zip(names, total, strict=True))
        for group, total in sorted(totals.items())
    ]


def forget(database: Database, before: datetime) -> int:
    """Delete the rows of requests that finished before ``before``; return how many there were."""
    bound = (before.timestamp(),)
    count = database.query("SELECT COUNT(*) FROM quire_ledger WHERE finished_at < ?", bound)[0][0]
    database.query("DELETE FROM quire_ledger WHERE finished_at < ?", bound)
    return int(count)
