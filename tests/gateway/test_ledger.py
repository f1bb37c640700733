"""The ledger: nothing lost, nothing doubled, whatever the database does."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.gateway.services import Postgres, postgres_server, wait_until

from quire.errors import ConfigError
from quire_gateway.ledger import Ledger
from quire_gateway.ledger_database import Database, Sqlite, open_database
from quire_gateway.ledger_report import forget, report
from quire_gateway.ledger_row import Row
from quire_gateway.prices import Price

NOTHING = {"unsettled": 0, "estimated": 0, "met_slo": 0, "engine_s": 0, "kv_block_s": 0, "goodput": 0}
DAY = datetime(2026, 11, 22, 12, tzinfo=UTC).timestamp()


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with postgres_server() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "ledger.sqlite")
    server: Postgres = request.getfixturevalue("postgres")
    database = open_database(server.url)
    database.query("DROP TABLE IF EXISTS quire_ledger")
    database.close()
    return server.url


def row(number: int, **values: object) -> Row:
    base = Row(
        f"r{number}",
        DAY,
        "lab",
        "alice",
        "m",
        "b0",
        "/v1/chat/completions",
        "finished",
        10,
        4,
        5,
        2.0,
        3.0,
        7,
    )
    return replace(base, **values)  # type: ignore[arg-type]


def totals(url: str) -> dict[str, int]:
    database = open_database(url)
    found = report(database, [])
    database.close()
    return found[0]


def test_every_row_is_written_once(url: str, tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    ledger = Ledger(open_database(url), tmp_path / "spool")
    tokens = 0
    for i in range(3_000):
        n = rng.randrange(1000)
        tokens += n
        ledger.record(row(i, output_tokens=n))
        if rng.random() < 0.1:
            ledger.record(row(i, output_tokens=n))  # the same request told twice
    ledger.close()
    assert totals(url) == {
        "requests": 3_000,
        "prompt_tokens": 30_000,
        "cached_tokens": 12_000,
        "output_tokens": tokens,
        "price_nano": 21_000,
        **NOTHING,
    }


def test_several_gateways_write_at_once(url: str, tmp_path: Path) -> None:
    def write(part: int) -> None:
        ledger = Ledger(open_database(url), tmp_path / f"spool{part}")
        for i in range(1_000):
            ledger.record(row(i % 500 + 400 * part))  # a fifth of them overlap
        ledger.close()

    threads = [threading.Thread(target=write, args=(part,)) for part in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert totals(url)["requests"] == 1_300
    assert not list(tmp_path.glob("spool*"))


def test_report_groups_by_day_and_month(url: str) -> None:
    database = open_database(url)
    rows = [row(i, finished_at=DAY + 86_400 * i, tenant=f"t{i % 2}") for i in range(12)]
    database.insert(rows)
    assert [each["requests"] for each in report(database, ["tenant"])] == [6, 6]
    assert [(each["month"], each["requests"]) for each in report(database, ["month"])] == [
        ("2026-11", 9),
        ("2026-12", 3),
    ]
    days = report(database, ["tenant", "day"], since=datetime(2026, 11, 24, tzinfo=UTC))
    assert days[0] == {
        "tenant": "t0",
        "day": "2026-11-24",
        "requests": 1,
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "output_tokens": 5,
        "price_nano": 7,
        **NOTHING,
    }
    assert len(days) == 10
    assert report(database, [], until=datetime(2026, 1, 1, tzinfo=UTC))[0]["requests"] == 0
    assert forget(database, datetime(2026, 11, 25, tzinfo=UTC)) == 3
    with pytest.raises(ConfigError, match="tenant, key, model"):
        report(database, ["tennant"])
    database.close()


def test_a_report_has_goodput_over_its_time(url: str) -> None:
    database = open_database(url)
    values = {"engine_s": 0.25, "kv_block_s": 2.5, "e2el_ms": 1000.0}
    database.insert(
        [row(i, finished_at=DAY + i, met_slo=i % 2, tenant=f"t{i % 2}", **values) for i in range(9)]
    )
    lines = report(database, ["tenant"])  # from the first arrival to the last end: 9 s
    assert [(each["met_slo"], each["goodput"]) for each in lines] == [(0, 0.0), (4, round(4 / 9, 6))]
    assert [(each["engine_s"], each["kv_block_s"]) for each in lines] == [(1.25, 12.5), (1.0, 10.0)]
    database.close()


def test_a_table_of_an_older_version_gets_its_columns(url: str) -> None:
    database = open_database(url)
    database.insert([row(1)])
    for name in ("estimated", "met_slo", "engine_s", "kv_block_s"):
        database.query(f"ALTER TABLE quire_ledger DROP COLUMN {name}")
    database.close()
    database = open_database(url)
    database.insert([row(2, engine_s=1.5)])
    assert (report(database, [])[0]["requests"], report(database, [])[0]["engine_s"]) == (2, 1.5)
    database.close()


def test_rows_spool_while_postgres_is_gone(postgres: Postgres, tmp_path: Path) -> None:
    open_ = open_database(postgres.url)
    open_.query("DROP TABLE IF EXISTS quire_ledger")
    open_.close()
    spool = tmp_path / "spool"
    ledger = Ledger(open_database(postgres.url), spool)
    ledger.record(row(0))
    postgres.stop()
    try:
        for i in range(1, 700):
            ledger.record(row(i))
        wait_until(lambda: ledger.is_spooling and not ledger.num_waiting, "spooling")
        assert spool.exists()
    finally:
        postgres.start()
    wait_until(lambda: not spool.exists(), "emptying the spool")
    ledger.close()
    assert totals(postgres.url)["requests"] == 700


def test_a_spool_outlives_its_gateway(tmp_path: Path) -> None:
    spool = Sqlite(tmp_path / "spool")
    spool.insert([row(i) for i in range(1_200)])
    spool.close()
    path = tmp_path / "ledger.sqlite"
    Ledger(open_database(str(path)), tmp_path / "spool").close()
    deadline = time.monotonic() + 60
    while (tmp_path / "spool").exists() and time.monotonic() < deadline:
        Ledger(open_database(str(path)), tmp_path / "spool").close()
    assert totals(str(path))["requests"] == 1_200


WRITER = """
import sys, time
from pathlib import Path
from quire_gateway.ledger import Ledger
from quire_gateway.ledger_database import open_database
from tests.gateway.test_ledger import row
ledger = Ledger(open_database(sys.argv[1]), Path(sys.argv[1] + ".spool"))
for i in range(400):
    ledger.record(row(i))
time.sleep(0.02)
print("told", flush=True)
deadline = time.monotonic() + 60
while ledger.num_waiting and time.monotonic() < deadline:
    time.sleep(0.01)
print("written", flush=True)
time.sleep(60)
"""


def test_rows_written_before_a_kill_stay(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["told\n", "written\n"]
    process.kill()
    process.wait()
    process.stdout.close()
    assert totals(str(path))["requests"] == 400


class Failing:
    """A database that fails at random, also after it has taken the rows."""

    def __init__(self, inner: Database, seed: int) -> None:
        self._inner = inner
        self._random = random.Random(seed)
        self.healthy = False

    def insert(self, rows: list[Row]) -> None:
        choice = 1.0 if self.healthy else self._random.random()
        if choice < 0.3:
            raise OSError("gone")
        self._inner.insert(rows)
        if choice < 0.6:
            raise OSError("the answer was lost")

    def query(self, sql: str, values: object = ()) -> list[tuple[object, ...]]:
        return self._inner.query(sql, values)  # type: ignore[arg-type]

    def close(self) -> None:
        self._inner.close()


def test_a_flaky_database_loses_and_doubles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_gateway.ledger.RETRY_S", 0.05)
    monkeypatch.setattr("quire_gateway.ledger.FLUSH_S", 0.01)
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    path = tmp_path / "ledger.sqlite"
    database = Failing(open_database(str(path)), seed)
    ledger = Ledger(database, tmp_path / "spool")  # type: ignore[arg-type]
    for i in range(2_000):
        ledger.record(row(i))
        if i % 50 == 0:
            time.sleep(0.005)
    database.healthy = True
    wait_until(lambda: not ledger.num_waiting and not (tmp_path / "spool").exists(), "writing all")
    ledger.close()
    assert totals(str(path))["requests"] == 2_000


def test_a_wrong_ledger_url_names_what_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="postgresql://"):
        open_database("mysql://x/y")
    (tmp_path / "text").write_text("no database " * 100)
    with pytest.raises(ConfigError, match="cannot be opened"):
        open_database(str(tmp_path / "text"))


def test_prices_count_cached_input_apart() -> None:
    price = Price(input=0.15, cached_input=0.075, output=0.6)
    assert price.nano(1_000_000, 400_000, 10_000) == round((0.6 * 0.15 + 0.4 * 0.075 + 0.01 * 0.6) * 1e9)
    assert Price(input=1.0).nano(10, 10, 99) == 10_000


def test_sqlite_survives_a_reader(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(open_database(str(path)), tmp_path / "spool")
    reader = sqlite3.connect(path)
    reader.execute("BEGIN")
    reader.execute("SELECT COUNT(*) FROM quire_ledger").fetchall()
    ledger.record(row(1))
    ledger.close()
    reader.close()
    assert totals(str(path))["requests"] == 1
