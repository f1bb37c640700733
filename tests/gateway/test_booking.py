"""A gateway that was killed: what its journal and the replicas know is booked, once."""

from __future__ import annotations

import asyncio
import json
import mmap
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.api.asgi_client import Api
from tests.gateway.live import Received, Scripted, answer, begin_stream, chunk, frame, gateway, says
from tests.gateway.test_ledger import row
from tests.gateway.test_tenants import rows

from quire.http.account import USAGE_PATH, Account, Used, UsedPage, ledger_header
from quire_gateway import booking
from quire_gateway.journal import FIRST_SLOTS, SLOT_BYTES, Journal
from quire_gateway.ledger_database import Sqlite, ledger_identity
from quire_gateway.ledger_report import report
from quire_gateway.ledger_row import RECOVERED, UNSETTLED

KEY = "between-us"
KILLED = """
import os, signal, sys
from dataclasses import replace
from pathlib import Path
from quire_gateway.journal import Journal
from tests.gateway.test_ledger import row
journal = Journal(Path(sys.argv[1]))
slots = [journal.put(None, row(i, outcome="unsettled")) for i in range(1500)]
for slot in slots[:500]:
    journal.free(slot)
for i, slot in enumerate(slots[500:1000]):
    journal.count(slot, i)
for i, slot in enumerate(slots[1000:], 1000):
    assert journal.put(slot, row(i, outcome="ok")) not in (None, slot)
print("written", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_journal_outlives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("written\n", -9), done.stderr
    journal = Journal(path)
    found = {each.request_id: each for _, each, _ in journal.inherited}
    assert sorted(int(name[1:]) for name in found) == list(range(500, 1500))
    assert [found[f"r{500 + i}"].output_tokens for i in range(500)] == list(range(500))
    assert found["r1499"] == row(1499, outcome="ok")
    other = Journal(path)  # of another gateway in the same folder
    assert other.path.name == "journal.1"
    for slot, _, _ in journal.inherited:
        journal.free(slot)
    other.close()
    journal.close()
    assert not list(tmp_path.iterdir())
    assert FIRST_SLOTS < 1500


COUNTS = """
import sys
from pathlib import Path
from quire_gateway.journal import Journal
from tests.gateway.test_ledger import row
journal = Journal(Path(sys.argv[1]))
slot = journal.put(None, row(1, outcome="unsettled"))
print(slot, flush=True)
number = 1 << 24
while True:
    journal.count(slot, number)
    number += 1
"""


def test_a_count_is_never_half_written(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with subprocess.Popen([sys.executable, "-c", COUNTS, str(path)], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            start = int(other.stdout.readline()) * SLOT_BYTES + 4
            with path.with_name("journal.0").open("rb") as file:
                memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            numbers = memoryview(memory)[start : start + 4].cast("I")
            while numbers[0] == 0:
                time.sleep(0.001)
            deadline = time.monotonic() + 1.0
            while time.monotonic() < deadline:
                assert min(numbers[0] for _ in range(1000)) >= 1 << 24
        finally:
            other.kill()


class Watched:
    """A map that calls ``look`` after each write."""

    def __init__(self, memory: mmap.mmap, look: Callable[[], None]) -> None:
        self.memory, self.look = memory, look

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory, name)

    def __len__(self) -> int:
        return len(self.memory)

    def __setitem__(self, where: slice, data: bytes) -> None:
        self.memory[where] = data
        self.look()


@pytest.mark.parametrize("lower", [False, True], ids=["higher slot", "lower slot"])
def test_a_row_is_there_at_every_moment_of_its_replacement(lower: bool, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    spare = journal.put(None, row(9))
    slot = journal.put(None, row(1, outcome=UNSETTLED))
    assert spare is not None
    journal.free(spare)
    if lower:
        journal.free_slots.rotate(1)
    outcomes: list[str] = []

    def look() -> None:  # as the next gateway does
        copy = tmp_path / str(len(outcomes)) / "journal"
        copy.parent.mkdir()
        shutil.copy(tmp_path / "journal.0", f"{copy}.0")
        [(_, found, _)] = Journal(copy).inherited
        assert found.request_id == "r1"
        outcomes.append(found.outcome)

    journal.mapped = Watched(journal.mapped, look)  # type: ignore[assignment]
    taken = journal.put(slot, row(1, outcome="ok"))
    assert taken is not None
    assert slot is not None
    assert (taken < slot) == lower
    assert outcomes == [UNSETTLED, "ok", "ok"]


def test_a_row_that_knows_more_replaces_one_that_knows_less(tmp_path: Path) -> None:
    database = Sqlite(tmp_path / "l.sqlite")
    known = [
        row(1, outcome=UNSETTLED, output_tokens=1),
        row(1, outcome=RECOVERED, output_tokens=2),
        row(1, outcome=RECOVERED, output_tokens=3),
        row(1, outcome="ok", output_tokens=4),
    ]
    for i, first in enumerate(known):
        for j, second in enumerate(known):
            database.insert([replace(first, request_id=f"{i}{j}")])
            database.insert([replace(second, request_id=f"{i}{j}")])
            found = database.query("SELECT output_tokens FROM quire_ledger WHERE request_id = ?", [f"{i}{j}"])
            assert found == [(1 + max(i, j),)], (i, j)
    assert report(database, [])[0]["unsettled"] == 1
    database.close()


def used(number: int, name: str, tokens: int, ledger: str = "") -> Used:
    return Used(number, name, time.time(), "lab", "alice", "m", "/v1/completions", 9, 4, tokens, 12.0, ledger)


def test_a_killed_gateways_requests_are_booked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(booking, "PASSES_S", (0.0, 0.1))
    monkeypatch.setattr(booking, "FLEET_LOOK_S", 0.02)
    since, asked = time.time() - 60.0, []
    own, other = ledger_identity(Sqlite(tmp_path / "ledger.sqlite")), "0" * 32
    foreign = [used(3, "f1", 90, other), used(4, "f2", 90)]
    pages = [
        UsedPage(since, [*foreign, used(5, "r1", 20, own)], True),
        UsedPage(since, [used(6, "r9", 2, own), used(7, "f3", 90, other)]),
    ]

    async def replica(request: Received, writer: asyncio.StreamWriter) -> None:
        assert request.headers["x-quire-gateway-key"] == KEY
        asked.append(request.path)
        page = pages.pop(0) if pages else UsedPage(since, [])
        await answer(writer, 200, msgspec.json.encode(page))

    old = Journal(tmp_path / "ledger.sqlite.journal")
    now, backends = time.time(), {"r1": "b0", "r2": "b0", "r3": "b1"}
    for name, backend in backends.items():
        slot = old.put(None, row(0, request_id=name, backend=backend, outcome=UNSETTLED, finished_at=now))
        assert slot is not None
        old.count(slot, 7)
    old.put(None, row(0, request_id="r4", outcome="ok", output_tokens=5))
    old.close()

    async def main() -> None:
        quire = Scripted(replica, card={"fingerprint": "f"})
        settings = {"ledger": str(tmp_path / "ledger.sqlite"), "gateway_key": KEY}
        settings["prices"] = {"m": {"input": 2.0, "cached_input": 0.5, "output": 1.0}}
        settings["limits"] = {"tenants": {"lab": {"tokens_per_day": 10_000}}}
        async with gateway(quire, Scripted(says("x")), **settings) as live:
            await live.until(lambda: len(asked) >= 3)
            left, remaining = 10_000 - (9 + 20) - (row(0).prompt_tokens + 7), 0
            while remaining != left:
                (budget,) = await live.state.tenants.limits.allowances([("alice", "lab")], ["m"])
                remaining = budget.remaining
                await asyncio.sleep(0.02)

    asyncio.run(asyncio.wait_for(main(), 60))
    found = rows(tmp_path)
    assert (found["recovered"]["requests"], found["recovered"]["output_tokens"]) == (2, 22)
    assert (found["recovered"]["prompt_tokens"], found["recovered"]["cached_tokens"]) == (18, 8)
    assert found["recovered"]["price_nano"] == (10 * 2000 + 8 * 500) + 22_000
    assert (found["unsettled"]["requests"], found["unsettled"]["output_tokens"]) == (
        1,
        7,
    )  # r3; r2 began nowhere
    assert (found["ok"]["requests"], found[""]["unsettled"]) == (1, 1)
    assert asked[:3] == [f"{USAGE_PATH}?after={number}&ledger={own}" for number in (0, 5, 7)]
    assert not list(tmp_path.glob("*.journal*"))


def test_a_left_stream_is_booked_as_its_replica_counts(tmp_path: Path) -> None:
    async def replica(request: Received, writer: asyncio.StreamWriter) -> None:
        if request.path.startswith(USAGE_PATH):
            name = request.path.partition("id=")[2]
            data = [used(1, name, 33)] if name else []
            await answer(writer, 200, msgspec.json.encode(UsedPage(time.time(), data)))
            return
        await begin_stream(writer)
        while True:
            await chunk(writer, frame({"text": "a"}))
            await asyncio.sleep(0.005)

    async def main() -> None:
        settings = {"ledger": str(tmp_path / "ledger.sqlite"), "gateway_key": KEY}
        async with gateway(Scripted(replica, card={"fingerprint": "f"}), **settings) as live:
            body = {"model": "m", "prompt": "hello", "stream": True}
            async with live.session.post(live.url + "/v1/completions", json=body) as response:
                await response.content.readany()
                response.close()
            await live.until(lambda: live.state.num_open == 0)

    asyncio.run(asyncio.wait_for(main(), 60))
    left = rows(tmp_path)["left"]
    assert (left["prompt_tokens"], left["cached_tokens"], left["output_tokens"]) == (9, 4, 33)


def test_a_replica_keeps_what_a_gateways_request_used() -> None:
    api = Api(gateway_key=KEY)
    headers = {"x-quire-gateway-key": KEY}
    account = dict(Account("row-1", "lab", "alice", 3.0).headers())
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 64}
    for extra in ({}, account, headers):  # without the key, and without an account, there is nothing to keep
        assert api.post("/v1/completions", body, headers=extra).status_code == 200
    assert api.call("GET", USAGE_PATH, headers=headers).json()["data"] == []
    usage = api.post("/v1/completions", body, headers=headers | account).json()["usage"]
    kwargs = api.frontend.submitted[-1].kwargs
    assert (kwargs["tenant"], kwargs["tenant_weight"]) == ("lab", 3.0)
    assert api.call("GET", USAGE_PATH).status_code == 403
    assert api.call("GET", USAGE_PATH, headers={"x-quire-gateway-key": "guess"}).status_code == 403
    page = msgspec.json.decode(api.call("GET", USAGE_PATH, headers=headers).content, type=UsedPage)
    (record,) = page.data
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    counts = (usage["prompt_tokens"], cached, usage["completion_tokens"])
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == counts
    said = (record.request_id, record.tenant, record.key, record.endpoint)
    assert said == ("row-1", "lab", "alice", "/v1/completions")
    after = api.call("GET", f"{USAGE_PATH}?after={record.number}", headers=headers)
    assert json.loads(after.content)["data"] == []
    assert len(api.call("GET", f"{USAGE_PATH}?id=row-1", headers=headers).json()["data"]) == 1


def test_a_record_names_its_ledger() -> None:
    api = Api(gateway_key=KEY)
    key, body = {"x-quire-gateway-key": KEY}, {"model": "tiny", "prompt": "hi"}
    for number, ledger in enumerate(("", "a" * 32, "b" * 32)):
        headers = key | dict([*Account(f"row-{number}").headers(), *ledger_header(ledger)])
        assert api.post("/v1/completions", body, headers=headers).status_code == 200

    def records(query: str) -> list[tuple[str, str]]:
        content = api.call("GET", f"{USAGE_PATH}?{query}", headers=key).content
        return [(each.request_id, each.ledger) for each in msgspec.json.decode(content, type=UsedPage).data]

    assert records(f"after=0&ledger={'a' * 32}") == [("row-0", ""), ("row-1", "a" * 32)]
    assert len(records("after=0")) == 3
