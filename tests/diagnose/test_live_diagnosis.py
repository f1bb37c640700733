"""Servers made bad on purpose, under load: `quire diagnose` names what is wrong with each first.

``QUIRE_SAVE_READINGS=FOLDER`` saves what was read, as in tests/diagnose/readings.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.e2e.live import LiveServer

from quire_lab.diagnose.figures import figures
from quire_lab.diagnose.read import Reading, read
from quire_lab.diagnose.rules import diagnose

pytestmark = pytest.mark.slow
SECONDS = 6.0
VOCAB = 250


class Load:
    """Clients that send one request after the other: ``prompt`` tokens behind ``prefix`` shared ones."""

    def __init__(self, clients: int, prompt: int, output: tuple[int, int], *, prefix: int = 0) -> None:
        self.clients, self.prompt, self.output = clients, prompt, output
        self.rng = random.Random(1)
        self.prefix = self._ids(prefix)

    def _ids(self, count: int) -> list[int]:
        return [self.rng.randrange(20, VOCAB) for _ in range(count)]

    async def client(self, session: aiohttp.ClientSession, url: str) -> None:
        while True:
            body: dict[str, Any] = {
                "model": "quill", "prompt": self.prefix + self._ids(self.prompt), "ignore_eos": True,
                "max_tokens": self.rng.randint(*self.output),
            }  # fmt: skip
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                await answer.read()


@asynccontextmanager
async def under(url: str, *loads: Load) -> AsyncIterator[None]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        tasks = [
            asyncio.create_task(load.client(session, url)) for load in loads for _ in range(load.clients)
        ]
        await asyncio.sleep(1.0)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


BAD: dict[str, tuple[list[str], list[Load]]] = {
    "kv-cache-too-small": (["--num-kv-blocks", "64"], [Load(16, 64, (100, 200))]),
    "static-batching": (["--gate", "static"], [Load(16, 32, (8, 400))]),
    "chunk-too-large": (
        ["--max-num-batched-tokens", "8192"], [Load(4, 16, (400, 600)), Load(1, 2500, (1, 1))],
    ),
    "no-prefix-cache": (["--no-prefix-caching"], [Load(4, 16, (4, 8), prefix=1500)]),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_named_first(name: str, tmp_path: Path) -> None:
    flags, loads = BAD[name]
    memory = () if "--num-kv-blocks" in flags else ("--kv-memory", "256MiB")
    command = ["-m", "quire.cli", "serve", "--port", "0", *memory, *flags]

    async def run(url: str) -> Reading:
        async with under(url, *loads):
            return await read(url, SECONDS)

    with LiveServer(command, tmp_path / "log") as server:
        reading = asyncio.run(run(server.url))
    if folder := os.environ.get("QUIRE_SAVE_READINGS"):
        (Path(folder) / f"{name}.json").write_text(json.dumps(reading.as_dict()))
    found = diagnose(figures(reading))
    assert [each.name for each in found.findings][:1] == [name], found
