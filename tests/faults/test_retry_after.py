"""A burst on a live server: the clients that are rejected and wait as long as they are told are served."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import httpx
import pytest
from tests.e2e.live import LiveServer
from tests.faults.conftest import COMMAND


async def one(client: httpx.AsyncClient, body: dict[str, object]) -> list[tuple[int, float]]:
    """Send a request, and once more after the time told; return (status, seconds told) of each try."""
    tries = []
    for _ in range(2):
        answer = await client.post("/v1/completions", json=body)
        tries.append((answer.status_code, float(answer.headers.get("retry-after", 0))))
        if answer.status_code != 503:
            break
        assert answer.json()["error"]["code"] == "queue_full"
        await asyncio.sleep(tries[-1][1])
    return tries


async def burst(url: str, seed: int) -> list[list[tuple[int, float]]]:
    rng = Random(seed)
    async with httpx.AsyncClient(
        base_url=url, timeout=120, limits=httpx.Limits(max_connections=None)
    ) as client:
        bodies = [
            {"prompt": "Once upon a time", "max_tokens": rng.randrange(40, 160), "ignore_eos": True}
            for _ in range(44)
        ]
        await asyncio.gather(
            *(client.post("/v1/completions", json=bodies.pop()) for _ in range(8))
        )  # a pace to go by
        return await asyncio.gather(*(one(client, body) for body in bodies))


@pytest.mark.slow
def test_clients_of_a_burst_that_wait_as_told_are_served(tmp_path: Path) -> None:
    seed = 7
    command = [*COMMAND, "--max-num-seqs", "2", "--max-queue", "4"]
    with LiveServer(command, tmp_path / "log") as live:
        tries = asyncio.run(burst(live.url, seed))
    returned = [each for each in tries if len(each) == 2]
    served = sum(each[1][0] == 200 for each in returned)
    told = [each[0][1] for each in returned]
    print(f"seed {seed}: {served} of {len(returned)} served, told {min(told):g} to {max(told):g} s")
    assert len(returned) >= 20
    assert max(told) > min(told)
    assert served >= 0.8 * len(returned)
