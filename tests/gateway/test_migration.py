"""Real replicas die by kill -9 under open streams; each client sees one stream, equal to the undisturbed one."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest
from tests.e2e.live import ROOT
from tests.gateway.asks import _IDS, asks, by_choice, without_ids
from tests.gateway.live import Live, gateway_of
from tests.gateway.services import free_port
from tests.gateway.test_resume import KEY, groups

from quire.errors import ModelLoadError
from quire.models.hub import quill_path
from quire_gateway.exchange import Exchange
from quire_gateway.migrate import Continuation
from quire_gateway.stage import Stage

START_S = 120.0
EXPLAIN = {"x-quire-explain": "1"}  # the answer names its replica
SEED = 11


@dataclass
class Replica:
    """``quire serve quill`` with all its processes in one group."""

    log: Path
    port: int = field(default_factory=free_port)
    flags: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "quire.cli", "serve", "quill", "--port", str(self.port)]
        command += ["--threads", "1", "--gateway-key", KEY, "--tool-format", "hermes", *self.flags]
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True
            )

    def kill(self) -> None:
        """Kill the API process, the engine and the helpers at once."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@asynccontextmanager
async def served(
    folder: Path, num: int, flags: tuple[str, ...] = (), stages: Sequence[Stage] = (), **settings: Any
) -> AsyncGenerator[tuple[Live, list[Replica]], None]:
    """Run ``num`` replicas with ``flags`` behind a gateway."""
    try:
        quill_path("quill")
    except ModelLoadError as error:
        pytest.skip(str(error))
    replicas = [Replica(folder / f"log{i}", flags=flags) for i in range(num)]
    config = {
        "backends": [{"name": f"r{i}", "url": each.url} for i, each in enumerate(replicas)],
        "health": {"interval_s": 0.2, "slow_start_s": 0.0},
        "routing": {"policy": "round-robin"},
        "timeouts": {"ready_s": START_S},
        "gateway_key": KEY,
        **settings,
    }
    try:
        for each in replicas:
            each.start()
        async with gateway_of(config, ready=False, stages=stages) as live:
            await until_ready(live, num)
            yield live, replicas
    finally:
        for each in replicas:
            each.kill()


async def until_ready(live: Live, num: int) -> None:
    async with asyncio.timeout(START_S):
        while sum(b.is_ready for b in live.state.fleet) < num:
            await asyncio.sleep(0.02)


async def answers(session: aiohttp.ClientSession, replica: Replica) -> bool:
    """Whether a replica takes requests."""
    try:
        async with session.get(f"{replica.url}/readyz", timeout=aiohttp.ClientTimeout(total=10)) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


async def direct(session: aiohttp.ClientSession, url: str, path: str, body: Any, of: Continuation) -> bytes:
    """Return the stream that a replica writes without interruption."""
    headers = dict(of.headers(KEY, resumes=False))
    async with session.post(url + path, json=body, headers=headers) as response:
        assert response.status == 200, await response.read()
        return b"".join(events for _, events in groups(await response.read()))


class Remembering(Stage):
    """Knows what each answer began with."""

    def __init__(self) -> None:
        self.made: dict[str, Continuation] = {}

    async def enter(self, exchange: Exchange) -> None:
        assert exchange.continuation is not None
        self.made[exchange.continuation.answer_id] = exchange.continuation


def test_streams_survive_kill_nine_frame_for_frame(tmp_path: Path) -> None:
    remembering = Remembering()
    made = remembering.made

    async def main() -> None:
        wanted = asks(80)
        async with served(tmp_path, 2, stages=[remembering]) as (live, replicas):
            begun: dict[str, set[int]] = {
                "r0": set(),
                "r1": set(),
            }  # the open streams whose first frames have come
            enough = asyncio.Event()

            async def ask(number: int, path: str, body: Any) -> bytes:
                pieces = []
                async with live.session.post(live.url + path, json=body, headers=EXPLAIN) as response:
                    assert response.status == 200, await response.read()
                    here = begun[response.headers["x-quire-backend"]]
                    async for piece in response.content.iter_any():
                        pieces.append(piece)
                        here.add(number)
                        if len(here) >= 4:
                            enough.set()
                    here.discard(number)
                return b"".join(pieces)

            while not live.state.metrics.migrations:  # a round may end before the replica is killed
                enough.clear()
                await until_ready(live, 2)
                tasks = [asyncio.create_task(ask(i, *each)) for i, each in enumerate(wanted)]
                waiting = [asyncio.gather(*tasks), asyncio.create_task(enough.wait())]
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                waiting[1].cancel()
                victim = max(range(2), key=lambda r: len(begun[f"r{r}"]))
                replicas[victim].kill()
                streams = await asyncio.gather(*tasks)
                if not live.state.metrics.migrations:
                    replicas[victim].start()
            for (path, body), stream in zip(wanted, streams, strict=True):
                found = _IDS.search(stream)
                answer = made[found[2].decode()] if found is not None else next(iter(made.values()))
                whole = await direct(live.session, replicas[1 - victim].url, path, body, answer)
                assert by_choice(stream) == by_choice(whole), (path, body)

    asyncio.run(asyncio.wait_for(main(), 240))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_kills_under_64_streams(tmp_path: Path) -> None:
    """``QUIRE_KILLS``: how many."""
    num_kills, random = int(os.environ.get("QUIRE_KILLS", "200")), Random(1)
    counts: Counter[str] = Counter()

    async def main() -> None:
        wanted = [(path, body if "options" in body else {**body, "seed": SEED}) for path, body in asks(160)]
        patient = {"attempts": 50, "budget": 1.0, "reserve": 10_000}  # kills come faster than streams begin
        async with served(tmp_path, 3, retries=patient) as (live, replicas):
            expected = []
            for number, (path, body) in enumerate(wanted):
                of = Continuation(f"{number:032x}", 1700000000, 0)
                whole = await direct(live.session, replicas[0].url, path, body, of)
                expected.append(by_choice(without_ids(whole)))

            async def stream_on(number: int) -> None:
                while counts["kills"] < num_kills:
                    chosen = number % len(wanted)
                    number += 1
                    path, body = wanted[chosen]
                    patience = aiohttp.ClientTimeout(total=None)  # a stream of a busy machine takes minutes
                    asking = (
                        live.session.post(  # a kept connection may end while this process waits for its turn
                            live.url + path, json=body, timeout=patience, headers={"connection": "close"}
                        )
                    )
                    async with asking as response:
                        stream = await response.read()
                    if response.status in (502, 503):  # no replica was left to begin it
                        counts["refused"] += 1
                        continue
                    counts["streams"] += 1
                    if by_choice(without_ids(stream)) != expected[chosen]:
                        counts["different"] += 1
                        (tmp_path / f"different{counts['different']}").write_bytes(stream)

            streams = [asyncio.create_task(stream_on(i)) for i in range(64)]
            while counts["kills"] < num_kills:
                await until_ready(live, 2)
                await asyncio.sleep(random.uniform(0.05, 0.8))
                ready = [i for i, each in enumerate(replicas) if await answers(live.session, each)]
                if len(ready) >= 2:  # else a kill could leave none
                    victim = replicas[random.choice(ready)]
                    victim.kill()
                    counts["kills"] += 1
                    victim.start()
                    await asyncio.sleep(0.3)  # the gateway has noticed
            await asyncio.gather(*streams)
            counts["migrations"] = sum(live.state.metrics.migrations.values())
            broken = {k: n for k, n in live.state.metrics.requests.items() if k[2] not in ("ok", "failed")}
            print(dict(counts), broken)
            assert counts["different"] == 0, dict(counts)
            assert not broken
            assert counts["migrations"] >= num_kills

    asyncio.run(asyncio.wait_for(main(), 3500))
