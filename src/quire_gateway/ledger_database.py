"""Where the ledger's rows are kept: an SQLite file or a PostgreSQL database. The key of a row is the request's id.

A table that an older version has made gets the columns that it lacks. A second table has the ledger's own id.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
from collections.abc import Sequence
from dataclasses import MISSING, astuple, fields
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from quire.errors import ConfigError
from quire.extras import needs
from quire.private import private_fd, tighten
from quire_gateway.ledger_row import RECOVERED, UNSETTLED, Row

COLUMNS = tuple(column.name for column in fields(Row))
_TYPES = {"str": "TEXT NOT NULL", "int": "BIGINT NOT NULL", "float": "DOUBLE PRECISION NOT NULL"}
_LATER = {column.name for column in fields(Row) if column.default is not MISSING}  # columns of later versions
_COLUMN_SQL = {
    column.name: f"{column.name} {_TYPES[str(column.type)]}{' DEFAULT 0' if column.name in _LATER else ''}"
    for column in fields(Row)
}
_CREATE = (
    f"CREATE TABLE IF NOT EXISTS quire_ledger ({', '.join(_COLUMN_SQL.values())}, PRIMARY KEY (request_id))",
    "CREATE INDEX IF NOT EXISTS quire_ledger_time ON quire_ledger (finished_at)",
    "CREATE TABLE IF NOT EXISTS quire_ledger_identity (number BIGINT NOT NULL, id TEXT NOT NULL, "
    "PRIMARY KEY (number))",
)


class Database(Protocol):
    """Where rows are kept. All calls block; one thread at a time."""

    def insert(self, rows: Sequence[Row]) -> None: ...

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]: ...

    def close(self) -> None: ...


class Sqlite:
    """An SQLite file in WAL mode: a commit survives the end of the process, the last ones not a power failure."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(
            private_fd(path, os.O_RDWR | os.O_CREAT)
        )  # SQLite gives its other files the mode of this one
        for end in ("", "-wal", "-shm"):
            tighten(path.with_name(path.name + end))
        self._connection = sqlite3.connect(path, timeout=30.0, check_same_thread=False)
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=NORMAL")
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")  # one gateway makes the tables
            for statement in _CREATE:
                self._connection.execute(statement)
            present = {column[1] for column in self._connection.execute("PRAGMA table_info(quire_ledger)")}
            for name in COLUMNS:
                if name not in present:
                    self._connection.execute(f"ALTER TABLE quire_ledger ADD COLUMN {_COLUMN_SQL[name]}")

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
                    # One gateway makes the tables.
                    self._connection.execute("SELECT pg_advisory_xact_lock(7112233)")
                    for statement in _CREATE:
                        self._connection.execute(statement)
                    for name in COLUMNS:
                        if name in _LATER:
                            added = f"ADD COLUMN IF NOT EXISTS {_COLUMN_SQL[name]}"
                            self._connection.execute(f"ALTER TABLE quire_ledger {added}")
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
    f"ON CONFLICT (request_id) DO UPDATE SET {', '.join(f'{column} = excluded.{column}' for column in COLUMNS[1:])} "
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


def ledger_identity(database: Database) -> str:
    """Return the ledger's id, which its first gateway has drawn."""
    insert = "INSERT INTO quire_ledger_identity (number, id) VALUES (1, ?) ON CONFLICT (number) DO NOTHING"
    database.query(insert, [secrets.token_hex(16)])
    return str(database.query("SELECT id FROM quire_ledger_identity WHERE number = 1")[0][0])
