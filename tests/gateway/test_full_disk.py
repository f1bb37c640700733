"""A full disk under the ledger: no row is lost, and no request is served that cannot be booked."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.live import Live, Received, Scripted, begin_stream, chunk, frame, gateway, says
from tests.gateway.services import wait_until
from tests.gateway.test_ledger import row, totals
from tests.gateway.test_tenants import rows

from quire.errors import ConfigError
from quire_gateway import journal as journals
from quire_gateway.books import Books
from quire_gateway.config_file import gateway_config
from quire_gateway.journal import SLOT_BYTES, Journal
from quire_gateway.ledger import Ledger
from quire_gateway.ledger_database import Sqlite, open_database

ASK = {"model": "m", "prompt": "hello"}


class Disk:
    """A disk that is full at will: allocating and writing to databases fail then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        self.num_refused = 0
        for owner, name, error in (
            (os, "posix_fallocate", OSError(errno.ENOSPC, "No space left on device")),
            (Sqlite, "insert", sqlite3.OperationalError("database or disk is full")),
        ):
            monkeypatch.setattr(owner, name, self._failing(getattr(owner, name), error))

    def _failing(self, does: Callable[..., Any], error: Exception) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if self.is_full:
                self.num_refused += 1
                raise error
            return does(*args)

        return call


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.setattr("quire_gateway.ledger.RETRY_S", 0.05)
    monkeypatch.setattr("quire_gateway.ledger.FLUSH_S", 0.01)
    monkeypatch.setattr(journals, "FIRST_SLOTS", 16)
    return Disk(monkeypatch)


def test_a_row_keeps_its_slot_until_a_disk_has_it(disk: Disk, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    ledger = Ledger(open_database(str(tmp_path / "l.sqlite")), tmp_path / "spool", journal.free)
    disk.is_full = True
    for number in range(10):
        ledger.record(row(number), journal.put(None, row(number)))
    wait_until(lambda: disk.num_refused >= 2, "an attempt at the database and one at the spool")
    time.sleep(0.05)
    assert (ledger.num_waiting, len(journal.free_slots)) == (10, 6)
    disk.is_full = False
    wait_until(lambda: not ledger.num_waiting, "writing all")
    assert len(journal.free_slots) == 16
    ledger.close()
    journal.close()
    assert totals(str(tmp_path / "l.sqlite"))["requests"] == 10


def test_rows_that_no_disk_took_are_booked_by_the_next_start(disk: Disk, tmp_path: Path) -> None:
    def main(numbers: range) -> None:
        books = Books(gateway_config({"ledger": str(tmp_path / "ledger.sqlite")}))
        for slot, found, _ in books.inherited():
            books.book_row(found, slot)
        assert books.ledger is not None
        assert books.journal is not None
        for number in numbers:
            books.ledger.record(row(number), books.journal.put(None, row(number)))
        disk.is_full = bool(numbers)
        books.close()

    main(range(12))
    assert (rows(tmp_path)[""]["requests"], len(list(tmp_path.glob("*.journal.0")))) == (0, 1)
    disk.is_full = False
    main(range(0))
    assert (rows(tmp_path)["finished"]["requests"], list(tmp_path.glob("*.journal.0"))) == (12, [])


def test_a_journal_is_allocated_and_grows_by_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "FIRST_SLOTS", 64)
    allocate, limit = os.posix_fallocate, 300 * SLOT_BYTES

    def limited(file: int, offset: int, size: int) -> None:
        allocate(file, offset, min(size, limit))
        if size > limit:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", limited)
    journal = Journal(tmp_path / "journal")
    assert journal.path.stat().st_blocks * 512 >= 64 * SLOT_BYTES
    slots = []
    while (slot := journal.put(None, row(len(slots)))) is not None:
        slots.append(slot)
    assert len(slots) == 256 - 1  # 64, 128, 256 slots; 512 and 320 have no room; one is spare
    assert journal.path.stat().st_size == 256 * SLOT_BYTES
    replaced = [journal.put(slot, row(number, outcome="ok")) for number, slot in enumerate(slots)]
    assert None not in replaced
    assert {each.outcome for _, each, _ in Journal(_copy(journal, tmp_path)).inherited} == {"ok"}


def _copy(journal: Journal, folder: Path) -> Path:
    (folder / "copy").mkdir()
    (folder / "copy" / "journal.0").write_bytes(journal.path.read_bytes())
    return folder / "copy" / "journal"


def test_long_names_do_not_keep_a_row_out(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    long = row(1, model="m" * 500, backend="ü" * 300, tenant="t" * 200, key="k" * 200, endpoint="/" * 90)
    assert journal.put(None, long, "m" * 1000) is not None
    [(_, found, limited)] = Journal(_copy(journal, tmp_path)).inherited
    assert (found.model, found.backend, found.tenant, limited) == ("m" * 40, "ü" * 20, "t" * 80, "m" * 40)
    assert (found.request_id, found.output_tokens) == (long.request_id, long.output_tokens)


def test_what_cannot_be_booked_is_not_served(disk: Disk, tmp_path: Path) -> None:
    backend = Scripted(says("hello"))

    async def main() -> int:
        async with gateway(backend, ledger=str(tmp_path / "ledger.sqlite")) as live:
            disk.is_full = True
            answers = [await live.post(ASK) for _ in range(30)]
            refused = [json for status, json in answers if status == 503]
            assert live.headers["retry-after"] == "2"
            assert {status for status, _ in answers} == {200, 503}
            assert all(b"ledger_full" in each for each in refused)
            assert len(backend.received) == 30 - len(refused) == 15
            shown = live.state.metrics.exposition("")[0]
            assert b"quire:gateway_ledger_rows_waiting 15.0" in shown
            assert b"quire:gateway_ledger_refused_total 15.0" in shown
            disk.is_full = False
            await live.until(lambda: live.state.books.num_waiting == 0)
            assert (await live.post(ASK))[0] == 200
            assert (live.state.books.num_refused, live.state.books.num_left_out) == (15, 15)
            return len(backend.received)

    assert asyncio.run(asyncio.wait_for(main(), 60)) == rows(tmp_path)["ok"]["requests"] == 16


def test_begun_needs_a_slot(disk: Disk, tmp_path: Path) -> None:
    """Requests that passed the first check together, and wait for a backend, are more than the slots."""
    backend = Scripted(says("hello"))

    async def main() -> None:
        async with gateway(backend, ledger=str(tmp_path / "ledger.sqlite")) as live:
            disk.is_full = True
            live.state.books.check = lambda: None  # type: ignore[method-assign]
            found = [(await live.post(ASK))[0] for _ in range(20)]
            assert found == [200] * 15 + [503] * 5
            assert len(backend.received) == 15
            assert [live.state.router.loads[b.number].requests for b in live.state.fleet] == [0]

    asyncio.run(asyncio.wait_for(main(), 60))


def test_streams_that_run_are_booked_though_the_disk_fills(disk: Disk, tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def slow(request: Received, writer: asyncio.StreamWriter) -> None:
        await begin_stream(writer)
        await chunk(writer, frame({"id": "c", "text": "a"}))
        await go_on.wait()
        await chunk(writer, frame({"id": "c", "usage": {"prompt_tokens": 3, "completion_tokens": 8}}))
        await chunk(writer, b"")

    async def main() -> None:
        async with gateway(Scripted(slow), ledger=str(tmp_path / "ledger.sqlite")) as live:
            asked = [asyncio.create_task(live.post(ASK | {"stream": True})) for _ in range(40)]
            await live.until(lambda: sum(task.done() for task in asked) == 0 and live.state.num_open == 40)
            await live.until(lambda: len(live.state.books.journal.free_slots) == 24)  # type: ignore[union-attr]
            disk.is_full = True
            go_on.set()
            assert {status for status, _ in await asyncio.gather(*asked)} == {200}
            await live.until(lambda: live.state.num_open == 0)
            assert live.state.books.num_waiting == 40

    asyncio.run(asyncio.wait_for(main(), 60))
    disk.is_full = False
    journal = Journal(tmp_path / "ledger.sqlite.journal")
    assert [(each.outcome, each.output_tokens) for _, each, _ in journal.inherited] == [("ok", 8)] * 40


def test_a_first_start_on_a_full_disk_is_one_line(disk: Disk, tmp_path: Path) -> None:
    disk.is_full = True
    with pytest.raises(ConfigError, match=r"No space left on device \(it needs 512 KiB\)") as error:
        Books(gateway_config({"ledger": str(tmp_path / "ledger.sqlite")}))
    assert "\n" not in str(error.value)


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(tmp_path)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"mounting needs rights that this process has not: {done.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def _fill(folder: Path) -> None:
    with (folder / "filling").open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_real_disk_that_fills_and_empties_loses_no_row(
    tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire_gateway.ledger.RETRY_S", 0.05)
    monkeypatch.setattr(journals, "FIRST_SLOTS", 64)
    backend, folder = Scripted(says("hello")), tmpfs

    async def burst(live: Live) -> int:
        found = await asyncio.gather(*(live.post(ASK) for _ in range(50)))
        assert {status for status, _ in found} <= {200, 503}
        return sum(status == 200 for status, _ in found)

    async def main() -> int:
        total = 0
        async with gateway(backend, ledger=str(folder / "ledger.sqlite")) as live:
            for _ in range(2):
                total += await burst(live)
                _fill(folder)
                while (more := await burst(live)) == 50:
                    total += more
                total += more
                (folder / "filling").unlink()
                await live.until(lambda: live.state.books.num_waiting == 0)
            assert live.state.books.num_refused > 0
        return total

    answered = asyncio.run(asyncio.wait_for(main(), 100))
    assert answered == len(backend.received) == rows(folder)["ok"]["requests"]


def test_a_start_on_a_real_full_disk_is_one_line(tmpfs: Path) -> None:
    _fill(tmpfs)
    with pytest.raises(ConfigError, match="No space left on device"):
        Books(gateway_config({"ledger": str(tmpfs / "ledger.sqlite")}))
    (tmpfs / "filling").unlink()
    Books(gateway_config({"ledger": str(tmpfs / "ledger.sqlite")})).close()
