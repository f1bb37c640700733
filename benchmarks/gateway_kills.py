"""Replicas that are killed, stopped, or killed while they load, under requests that wait in their queues.

    python -m benchmarks.gateway_kills                                       # 2 kills, 1 stop: in two minutes
    python -m benchmarks.gateway_kills --kills 20 --stops 10 --report        # the whole

64 seeded requests, half of them streams, go through a gateway to two real replicas that run four each, so each has a
queue. Then a replica and all its processes get kill -9, or SIGSTOP until its requests have left it. Every answer is
compared with an undisturbed one: text, reason of the end, counts of tokens. Each row has the answers by status, how
long after its backend was found lost a request without a byte was with another one, and how many streams were
continued. At the end the ledger's rows are compared with the answers, and again after another gateway has read what the
replicas know. The last row is of ``quire serve --replicas 2``: one is killed, and its successor twice while it loads.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
from tests.e2e.live import LiveServer
from tests.faults.report import table, write_section
from tests.gateway.live import Live, gateway_of
from tests.gateway.test_migration import KEY, Replica, served, until_ready

from quire_gateway.exchange import Exchange
from quire_gateway.fleet import Backend
from quire_gateway.placing import Placed

HEAD = ("fault", "times", "requests", "waiting at each, at least", "answers that are not 200", "differ",
        "moved without a byte", "after it was found lost, s (median / max)", "stayed", "streams continued")  # fmt: skip
FLAGS = ("--max-num-seqs", "4")
MODEL = "quill"
TOKENS = 160
LIMIT_S = 300.0  # for a round
START_S = 120.0
READ_S = 13.0  # in which a gateway reads the replicas' records: `booking.PASSES_S` and a little more


def request_of(number: int) -> dict[str, Any]:
    streams = {"stream": True, "stream_options": {"include_usage": True}} if number % 2 else {}
    return {"model": MODEL, "prompt": f"Story {number}. Once upon a time", "max_tokens": TOKENS, "seed": number,
            "temperature": 1.0, "ignore_eos": True, **streams}  # fmt: skip


@dataclass(frozen=True)
class Answer:
    status: int
    text: str
    reason: str | None = None
    tokens: tuple[int, int] = (0, 0)  # prompt, output


def answer_of(status: int, body: bytes) -> Answer:
    """Read a whole answer or a stream."""
    if status != 200:
        return Answer(status, body.decode(errors="replace"))
    values = [body]
    if body.startswith(b"data:"):
        values = [part[6:] for part in body.split(b"\n\n") if part.startswith(b"data: {")]
    text, reason, tokens = "", None, (0, 0)
    for value in map(json.loads, values):
        if "error" in value:
            return Answer(502, text + json.dumps(value["error"]))
        for choice in value["choices"]:
            text += choice["text"]
            reason = choice["finish_reason"] or reason
        if usage := value.get("usage"):
            tokens = (usage["prompt_tokens"], usage["completion_tokens"])
    return Answer(status, text, reason, tokens)


async def ask_all(live: Live, num: int) -> list[Answer]:
    async def ask(number: int) -> Answer:
        patience = aiohttp.ClientTimeout(total=None)
        closes = {"connection": "close"}  # a kept connection may end while this process waits for its turn
        async with live.session.post(
            live.url + "/v1/completions", json=request_of(number), timeout=patience, headers=closes
        ) as response:
            return answer_of(response.status, await response.read())

    async with asyncio.timeout(LIMIT_S):
        return await asyncio.gather(*(ask(number) for number in range(num)))


@dataclass
class Row:
    fault: str
    times: int = 0
    num_requests: int = 0
    queues: list[int] = field(default_factory=list)  # at the moment of the fault, of the replica with fewer
    statuses: Counter[int] = field(default_factory=Counter)  # other than 200
    num_different: int = 0
    moved_s: list[float] = field(default_factory=list)
    num_stayed: int = 0
    num_continued: int = 0

    def take(self, answers: list[Answer], expected: list[Answer]) -> None:
        self.num_requests += len(answers)
        for found, wanted in zip(answers, expected, strict=True):
            self.statuses[found.status] += found.status != 200
            self.num_different += found.status == 200 and found != wanted

    def cells(self) -> tuple[str, ...]:
        bad = {status: count for status, count in self.statuses.items() if count}
        ordered = sorted(self.moved_s)
        times = f"{ordered[len(ordered) // 2]:.3f} / {ordered[-1]:.3f}" if ordered else "–"
        queue = str(min(self.queues)) if self.queues else "–"
        return (self.fault, str(self.times), str(self.num_requests), queue, str(bad or 0), str(self.num_different),
                str(len(ordered)), times, str(self.num_stayed), str(self.num_continued))  # fmt: skip

    @property
    def is_good(self) -> bool:
        return not (sum(self.statuses.values()) or self.num_different or self.num_stayed or self.is_late)

    @property
    def is_late(self) -> bool:
        return any(seconds > 1.0 for seconds in self.moved_s)


class Watch:
    """Notes where requests are placed, and when a backend is found lost."""

    def __init__(self, live: Live) -> None:
        self.placements: list[tuple[Exchange, Placed, bool]] = []  # had it begun
        self.ended_s: dict[str, float] = {}  # by the id of the placement
        self.lost_s: dict[str, float] = {}  # by backend
        self._place, self._ended = live.state.placing.place, live.state.placing.ended
        self._set_ready = live.state.fleet.set_ready
        self._now = live.state.now
        for owner, name in ((live.state.placing, "place"), (live.state.placing, "ended")):
            setattr(owner, name, getattr(self, name))
        live.state.fleet.set_ready = self.set_ready  # type: ignore[method-assign]

    def place(self, exchange: Exchange) -> Placed | None:
        placed = self._place(exchange)
        if placed is not None:
            self.placements.append((exchange, placed, exchange.answer.has_begun))
        return placed

    def ended(self, placed: Placed, is_good: bool | None) -> None:
        self.ended_s[placed.id] = self._now()
        self._ended(placed, is_good)

    def set_ready(self, backend: Backend, ready: bool, why: str, now: float, **more: Any) -> None:
        if not ready and backend.is_ready:
            self.lost_s.setdefault(backend.name, now)
        self._set_ready(backend, ready, why, now, **more)

    def waiting(self, name: str) -> int:
        """Return the requests at a backend that have no byte."""
        return sum(
            p.backend.name == name and p.id not in self.ended_s and not e.answer.has_begun
            for e, p, _ in self.placements
        )

    def forget(self) -> None:
        self.placements.clear()
        self.ended_s.clear()
        self.lost_s.clear()

    def tell(self, name: str, since_s: float, row: Row) -> None:
        """Add to ``row`` what became of the requests that backend ``name`` had at ``since_s``."""
        lost_s = self.lost_s.get(name, since_s)
        for at, (exchange, placed, _) in enumerate(self.placements):
            ended_s = self.ended_s.get(placed.id, float("inf"))
            if placed.backend.name != name or not placed.placed_s <= since_s < ended_s:
                continue
            later = [(p, begun) for e, p, begun in self.placements[at + 1 :] if e is exchange]
            if not later:
                # An answer that was on its way already is none that stayed.
                row.num_stayed += ended_s > lost_s
            elif later[0][1]:
                row.num_continued += 1
            else:
                row.moved_s.append(max(later[0][0].placed_s - lost_s, 0.0))


class Campaign:
    """Kills and stops of two replicas behind one gateway."""

    def __init__(self, live: Live, replicas: list[Replica], num: int, seed: int) -> None:
        self._live, self._replicas, self._num = live, replicas, num
        self._random = Random(seed)
        self._watch = Watch(live)
        self.answers: list[Answer] = []
        self.expected: list[Answer] = []

    async def undisturbed(self) -> Row:
        row = Row("none", 1)
        self.expected = await ask_all(self._live, self._num)
        self.answers += self.expected
        row.take(self.expected, self.expected)
        return row

    async def inject(self, row: Row) -> None:
        """One round with a fault of the row's kind in the middle."""
        live, watch = self._live, self._watch
        await until_ready(live, len(self._replicas))
        watch.forget()
        asking = asyncio.create_task(ask_all(live, self._num))
        names = [f"r{number}" for number in range(len(self._replicas))]
        while not asking.done() and min(map(watch.waiting, names)) < 4:
            await asyncio.sleep(0.005)
        await asyncio.sleep(self._random.uniform(0.0, 0.3))
        row.queues.append(min(map(watch.waiting, names)))
        number = self._random.randrange(len(names))
        victim, since_s = self._replicas[number], live.state.now()
        life = live.state.fleet.named(names[number]).life
        if row.fault == "kill -9":
            victim.kill()
            victim.start()
            await self._served(asking, row)
            async with asyncio.timeout(START_S):
                while live.state.fleet.named(names[number]).life == life:  # until it has started again
                    await asyncio.sleep(0.02)
        else:
            assert victim.process is not None
            os.killpg(victim.process.pid, signal.SIGSTOP)
            try:
                while names[number] not in watch.lost_s and not asking.done():
                    await asyncio.sleep(0.01)
                await asyncio.sleep(self._random.uniform(1.5, 4.0))  # it wakes while others answer
            finally:
                os.killpg(victim.process.pid, signal.SIGCONT)
            await self._served(asking, row)
        row.times += 1
        watch.tell(names[number], since_s, row)

    async def _served(self, asking: asyncio.Task[list[Answer]], row: Row) -> None:
        answers = await asking
        self.answers += answers
        row.take(answers, self.expected)


def booked(ledger: Path) -> tuple[int, int, int, dict[str, int]]:
    """Return rows, prompt and output tokens, and rows by outcome."""
    database = sqlite3.connect(ledger)
    with database:
        sums = database.execute(
            "SELECT count(*), sum(prompt_tokens), sum(output_tokens) FROM quire_ledger"
        ).fetchone()
        outcomes = dict(
            database.execute("SELECT outcome, count(*) FROM quire_ledger GROUP BY outcome").fetchall()
        )
    database.close()
    return (*sums, outcomes)


async def kills_and_stops(args: argparse.Namespace, folder: Path) -> tuple[list[Row], list[str]]:
    """Return the rows, and what is wrong with the ledger."""
    ledger = folder / "ledger.sqlite"
    settings: dict[str, Any] = {"ledger": str(ledger), "health": {"slow_start_s": 0.0}, "timeouts": {}}
    rows = [Row("kill -9"), Row("SIGSTOP")]
    faults = [rows[0]] * args.kills + [rows[1]] * args.stops
    Random(args.seed).shuffle(faults)
    async with served(folder, 2, FLAGS, **settings) as (live, replicas):
        campaign = Campaign(live, replicas, args.requests, args.seed)
        rows.insert(0, await campaign.undisturbed())
        print(table(HEAD, [rows[0].cells()]), flush=True)
        for row in faults:
            await campaign.inject(row)
            print("| " + " | ".join(row.cells()) + " |", flush=True)
        await asyncio.sleep(1.0)  # the last rows are written
        wrong = [_compared("after the campaign", booked(ledger), campaign.answers)]
        config = {
            "backends": [{"name": f"r{n}", "url": each.url} for n, each in enumerate(replicas)],
            "gateway_key": KEY,
            "ledger": str(ledger),
        }
        async with gateway_of(config):
            await asyncio.sleep(READ_S)
        wrong.append(_compared("after another gateway has read", booked(ledger), campaign.answers))
    return rows, [text for text in wrong if text]


def _compared(when: str, found: tuple[int, int, int, dict[str, int]], answers: list[Answer]) -> str:
    good = [answer for answer in answers if answer.status == 200]
    wanted = (len(answers), sum(a.tokens[0] for a in good), sum(a.tokens[1] for a in good))
    print(f"ledger {when}: rows, prompt and output tokens {found[:3]} of {wanted}; {found[3]}", flush=True)
    return "" if found[:3] == wanted else f"the ledger {when} has {found}, the answers are {wanted}"


@asynccontextmanager
async def replicas_server(folder: Path) -> AsyncGenerator[LiveServer, None]:
    ready = r"(?s)gateway listening url=(\S+).*backend_ready.*backend_ready"
    command = ["-m", "quire.cli", "serve", MODEL, "--port", "0", "--replicas", "2", *FLAGS]
    server = await asyncio.to_thread(LiveServer, command, folder / "log", None, ready, START_S)
    try:
        yield server
    finally:
        await asyncio.to_thread(server.stop)


def children(pid: int) -> set[int]:
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):
            if stat.read_text().rpartition(")")[2].split()[1] == str(pid):
                found.add(int(stat.parent.name))
    replicas = set()
    for child in found:
        with suppress(OSError):
            title = Path(f"/proc/{child}/cmdline").read_bytes()
            replicas |= (
                {child} if title and b"front" not in title else set()
            )  # the process that answers probes
    return replicas


async def killed_while_loading(expected: list[Answer], folder: Path, times: int) -> Row:
    """Kill one of two replicas, and its successors while they load, under requests one after the other."""
    row = Row("kill -9 while it loads")
    async with replicas_server(folder) as server, aiohttp.ClientSession() as session:

        async def ask_on(number: int) -> None:
            while not is_over.is_set():
                chosen = number % len(expected)
                number += 8
                async with session.post(server.url + "/v1/completions", json=request_of(chosen)) as response:
                    row.take([answer_of(response.status, await response.read())], [expected[chosen]])

        is_over = asyncio.Event()
        asking = [asyncio.create_task(ask_on(number)) for number in range(8)]
        survivor, *_ = known = sorted(children(server.process.pid))
        os.kill(known[1], signal.SIGKILL)
        for _ in range(times):
            successor = await _another(server, {survivor, known[1]})
            await asyncio.sleep(0.7)  # it loads
            os.kill(successor, signal.SIGKILL)
            row.times += 1
            known[1] = successor
        count = server.log.read_text().count("backend_ready")
        async with asyncio.timeout(START_S):
            while server.log.read_text().count("backend_ready") == count:
                assert server.process.poll() is None, server.log.read_text()[-2000:]
                await asyncio.sleep(0.1)
        is_over.set()
        await asyncio.gather(*asking)
        assert survivor in children(server.process.pid), server.log.read_text()[-2000:]
    return row


async def _another(server: LiveServer, known: set[int]) -> int:
    async with asyncio.timeout(START_S):
        while not (new := children(server.process.pid) - known):
            assert server.process.poll() is None, server.log.read_text()[-2000:]
            await asyncio.sleep(0.05)
    return new.pop()


async def everything(args: argparse.Namespace) -> tuple[list[Row], list[str]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows, wrong = await kills_and_stops(args, folder)
        if args.loading:
            (folder / "loading").mkdir()
            # Streams and whole answers are compared alike with those of the first part.
            expected = await _expected(args, folder)
            rows.append(await killed_while_loading(expected, folder / "loading", args.loading))
            print("| " + " | ".join(rows[-1].cells()) + " |", flush=True)
    return rows, wrong


async def _expected(args: argparse.Namespace, folder: Path) -> list[Answer]:
    path = folder / "alone"
    path.mkdir()
    async with served(path, 1, FLAGS) as (live, _):
        return await ask_all(live, args.requests)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--stops", type=int, default=1)
    parser.add_argument(
        "--loading", type=int, default=2, help="kills of a replica that loads; 0: not this part"
    )
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path, nargs="?", const=Path("benchmarks/results/faults.md"))
    args = parser.parse_args()
    begin_s = time.monotonic()
    rows, wrong = asyncio.run(everything(args))
    text = table(HEAD, [row.cells() for row in rows])
    text += f"\nSeed {args.seed}, {time.monotonic() - begin_s:.0f} s.\n"
    text += (
        "".join(f"\nWRONG: {each}\n" for each in wrong)
        or "\nThe ledger has a row for each answer and no other.\n"
    )
    print("\n" + text)
    if args.report:
        command = f"python -m benchmarks.gateway_kills --kills {args.kills} --stops {args.stops}"
        write_section("Replicas that die, hang or load", command, text, args.report)
    return int(bool(wrong) or not all(row.is_good for row in rows))


if __name__ == "__main__":
    sys.exit(main())
