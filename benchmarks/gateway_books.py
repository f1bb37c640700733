"""The books of gateways under kills and on a full disk: rows equal answers, no foreign row, none twice.

    python -m benchmarks.gateway_books                       # small: 600 requests for each part
    python -m benchmarks.gateway_books --requests 20000 --cycles 10

    kills   Two gateways have SQLite ledgers of their own over the same replicas. Each is killed (SIGKILL) thrice and
            started again while its clients ask. No request may be in both ledgers, and no ledger may have a row of the
            other gateway's tenant
    disk    One gateway's ledger is on a file system of 3 MiB that is filled and emptied while clients ask; the gateway
            is killed once while it is full. What cannot be booked is refused with 503 and Retry-After

In both parts the sums of the ledgers have to be what the engines computed. Mounting a small file system needs root;
without it the second part is left out, and says so. The replicas have a timed executor instead of a model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
from benchmarks.conservation import COUNTERS, KEY, Gateway, report, start_replica
from tests.e2e.live import LiveServer
from tests.gateway.services import free_port, wait_until

from quire.http.keys import ApiKey, create_key
from quire_gateway.ledger_database import open_database

WORKERS = 16  # clients of each gateway
SETTLING_S = 13.0  # after which a gateway has read the replicas' records for the last time
_DISK_MIB = 3


@dataclass
class Clients:
    """Asks one gateway with one key until ``wanted`` requests have been answered, and the disturbance is over."""

    gateway: Gateway
    key: str
    wanted: int
    counts: Counter[str] = field(default_factory=Counter)
    ended: bool = False

    async def run(self, disturb: Callable[[Clients], Awaitable[None]]) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=300), connector=connector
        ) as session:
            working = asyncio.gather(*(self._work(session, Random(number)) for number in range(WORKERS)))
            await disturb(self)
            while self.counts["answered"] < self.wanted:
                await asyncio.sleep(0.02)
            self.ended = True
            await working

    async def _work(self, session: aiohttp.ClientSession, random: Random) -> None:
        while not self.ended:
            text = " ".join(
                random.choice(("the", "cat", "sat", "on", "a", "mat")) for _ in range(random.randrange(40))
            )
            body = {
                "model": "quill",
                "prompt": text + ".",
                "max_tokens": random.randrange(1, 24),
                "ignore_eos": True,
            }
            body["stream"] = random.random() < 0.5
            headers = {"authorization": f"Bearer {self.key}"}
            try:
                async with session.post(
                    self.gateway.url + "/v1/completions", json=body, headers=headers
                ) as response:
                    said = await response.read()
            except (aiohttp.ClientError, ConnectionError):
                self.counts["cut off by a kill"] += 1
                await asyncio.sleep(0.1)
                continue
            if response.status == 200:
                self.counts["answered"] += 1
                continue
            self.counts[f"{response.status}"] += 1
            if response.status == 503 and "retry-after" not in response.headers:
                self.counts["503 without Retry-After"] += 1
            is_full = b"ledger_full" in said
            self.counts["ledger_full"] += is_full
            await asyncio.sleep(0.5 if is_full else 0.1)


def make_gateway(folder: Path, backends: list[str], ledger: Path, keys: Path) -> Gateway:
    folder.mkdir()
    port, config = free_port(), folder / "gateway.toml"
    lines = [f"port = {port}", f'gateway_key = "{KEY}"', f'ledger = "{ledger}"', f'key_file = "{keys}"']
    lines += ["[health]", "interval_s = 0.5", "[timeouts]", "first_token_s = 120.0"]
    for number, url in enumerate(backends):
        lines += ["[[backends]]", f'name = "r{number}"', f'url = "{url}"']
    config.write_text("\n".join(lines))
    return Gateway(config, port)


def _is_ready(url: str) -> bool:
    done = subprocess.run(["curl", "-s", "-m", "2", f"{url}/readyz"], capture_output=True, text=True)
    return '"ready"' in done.stdout


def computed(replicas: list[LiveServer]) -> dict[str, int]:
    return {name: sum(int(each.metric(metric)) for each in replicas) for name, metric in COUNTERS.items()}


def sums(ledger: Path) -> dict[str, Any]:
    found: dict[str, Any] = report(str(ledger))[0]
    found["outcomes"] = {line["outcome"]: line["requests"] for line in report(str(ledger), by="outcome")}
    found["tenants"] = [line["tenant"] for line in report(str(ledger), by="tenant")]
    return found


def ids(ledger: Path) -> set[str]:
    database = open_database(str(ledger))
    found = {row[0] for row in database.query("SELECT request_id FROM quire_ledger")}
    database.close()
    return found


def two_ledgers(num_requests: int, num_kills: int) -> dict[str, Any]:
    """Two gateways with ledgers of their own over the same two replicas; each is killed ``num_kills`` times."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-books-")))
        replicas = [stack.enter_context(start_replica(folder / f"r{i}", timed=True)) for i in range(2)]
        both = []
        for number in range(2):
            key = create_key(
                folder / f"keys{number}", ApiKey("k", f"t{number}", "", created=datetime.now(UTC))
            )
            ledger = folder / f"g{number}" / "ledger.sqlite"
            gateway = make_gateway(
                folder / f"g{number}", [r.url for r in replicas], ledger, folder / f"keys{number}"
            )
            stack.callback(gateway.end, signal.SIGKILL)
            gateway.start()
            wait_until(lambda url=gateway.url: _is_ready(url), "a gateway")  # type: ignore[misc]
            both.append(Clients(gateway, key, num_requests // 2))

        async def kill(clients: Clients) -> None:
            for number in range(num_kills):
                while clients.counts["answered"] < clients.wanted * (number + 1) // (num_kills + 1):
                    await asyncio.sleep(0.02)
                clients.gateway.end(signal.SIGKILL)
                clients.counts["kills"] += 1
                await asyncio.sleep(0.5)
                clients.gateway.start()

        async def run() -> None:
            await asyncio.gather(*(each.run(kill) for each in both))

        asyncio.run(run())
        time.sleep(SETTLING_S)
        engines = computed(replicas)
        for each in both:
            each.gateway.end(signal.SIGTERM)
        ledgers = [each.gateway.config.parent / "ledger.sqlite" for each in both]
        found = [sums(ledger) for ledger in ledgers]
        return {
            "clients": [dict(each.counts) for each in both],
            "engines": engines,
            "ledgers": found,
            "sums": {name: sum(each[name] for each in found) for name in COUNTERS},
            "in both": len(ids(ledgers[0]) & ids(ledgers[1])),
            "foreign": sum(each["tenants"] != [f"t{number}"] for number, each in enumerate(found)),
            "engine_s": [round(sum(each["engine_s"] for each in found), 3), _busy_s(replicas)],
        }


def _busy_s(replicas: list[LiveServer]) -> float:
    return round(sum(each.metric("quire:engine_busy_seconds_total") for each in replicas), 3)


@contextmanager
def small_disk(path: Path) -> Iterator[None]:
    """Mount a file system of 3 MiB at ``path``. Raises `PermissionError` where that is not possible."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_MIB}m", "tmpfs", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise PermissionError(f"mounting failed: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def full_disk(num_requests: int, num_cycles: int) -> dict[str, Any]:
    """One gateway whose disk is filled and emptied ``num_cycles`` times; SIGKILL comes once while it is full."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-books-")))
        disk = folder / "disk"
        stack.enter_context(small_disk(disk))
        replicas = [stack.enter_context(start_replica(folder / f"r{i}", timed=True)) for i in range(2)]
        key = create_key(folder / "keys", ApiKey("k", "t", "", created=datetime.now(UTC)))
        ledger, filling = disk / "ledger.sqlite", disk / "filling"
        gateway = make_gateway(folder / "g", [r.url for r in replicas], ledger, folder / "keys")
        stack.callback(gateway.end, signal.SIGKILL)
        gateway.start()
        wait_until(lambda: _is_ready(gateway.url), "the gateway")
        clients = Clients(gateway, key, num_requests)

        def fill() -> None:
            with filling.open("ab", buffering=0) as file, suppress(OSError):
                while True:
                    file.write(bytes(4096))

        async def disturb(clients: Clients) -> None:
            for number in range(num_cycles):
                before = clients.counts["answered"]
                while clients.counts["answered"] < before + clients.wanted // (num_cycles + 1):
                    await asyncio.sleep(0.02)
                refused = clients.counts["ledger_full"]
                while clients.counts["ledger_full"] < refused + WORKERS:  # the journal's slots are used up
                    await asyncio.to_thread(fill)
                    await asyncio.sleep(0.1)
                clients.counts["filled"] += 1
                if number == num_cycles // 2:
                    gateway.end(signal.SIGKILL)
                    clients.counts["kills"] += 1
                filling.unlink()
                if gateway.process is None:
                    gateway.start()

        asyncio.run(clients.run(disturb))
        time.sleep(SETTLING_S)
        engines = computed(replicas)
        gateway.end(signal.SIGTERM)
        found = sums(ledger)
        return {"clients": [dict(clients.counts)], "engines": engines, "ledgers": [found],
                "sums": {name: found[name] for name in COUNTERS}, "in both": 0,
                "foreign": int(found["tenants"] != ["t"]),
                "engine_s": [round(found["engine_s"], 3), _busy_s(replicas)]}  # fmt: skip


def is_right(found: dict[str, Any]) -> bool:
    """Whether the books are what was computed and answered."""
    rows_enough = all(
        sum(n for outcome, n in ledger["outcomes"].items() if outcome in ("ok", "recovered"))
        >= client["answered"]
        for ledger, client in zip(found["ledgers"], found["clients"], strict=True)
    )
    unsettled = sum(ledger["unsettled"] for ledger in found["ledgers"])
    unsure = found["in both"] + found["foreign"] + unsettled
    told = not any("503 without Retry-After" in client for client in found["clients"])
    return found["sums"] == found["engines"] and rows_enough and told and not unsure


def show(name: str, found: dict[str, Any]) -> None:
    print(f"\n{name}: {'right' if is_right(found) else 'WRONG'}")
    print(f"{'':16}{'ledgers':>12}{'engines':>12}")
    for counter in COUNTERS:
        print(f"{counter:16}{found['sums'][counter]:>12,}{found['engines'][counter]:>12,}")
    print(f"{'engine_s':16}{found['engine_s'][0]:>12,}{found['engine_s'][1]:>12,}")
    print(f"rows in both ledgers: {found['in both']}; ledgers with foreign tenants: {found['foreign']}")
    for client, ledger in zip(found["clients"], found["ledgers"], strict=True):
        print(f"clients {json.dumps(client)}")
        print(f"rows    {json.dumps(ledger['outcomes'])}, unsettled {ledger['unsettled']}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--kills", type=int, default=3, help="of each gateway")
    parser.add_argument("--cycles", type=int, default=2, help="how often the disk fills")
    parser.add_argument("--part", choices=("kills", "disk", "both"), default="both")
    args = parser.parse_args()
    all_right = True
    if args.part != "disk":
        found = two_ledgers(args.requests, args.kills)
        show(f"two gateways, each killed {args.kills} times", found)
        all_right &= is_right(found)
    if args.part != "kills":
        try:
            found = full_disk(args.requests, args.cycles)
        except PermissionError as error:
            print(f"\nthe disk's part was left out: {error}")
            return 1
        show(f"a disk that fills and empties {args.cycles} times", found)
        all_right &= is_right(found)
    return not all_right


if __name__ == "__main__":
    sys.exit(main())
