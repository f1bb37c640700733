"""Tenants share a replica by the weights of their keys, which travel through the gateway."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.e2e.live import LiveServer
from tests.gateway.live import gateway_of

from quire.cost.cost_model import CostModel
from quire.errors import ModelLoadError
from quire.http.keys import ApiKey, create_key
from quire.models.hub import quill_path

KEY = "between-us"
STEP_S = 0.004
TOKENS = 16
SEATS = 4
EACH = 24  # requests of a tenant
MAX_LEN = 8192  # more steps than the test takes


def timed_replica(folder: Path, **settings: Any) -> LiveServer:
    """Start a server that is real but for its model: each step sleeps."""
    try:
        quill_path("quill")
    except ModelLoadError as error:
        pytest.skip(str(error))
    (folder / "cost.json").write_text(json.dumps(CostModel(fixed_s=STEP_S).to_json()))
    flags = [
        f"{name}={value}" for name, value in {"gateway_key": KEY, "max_model_len": 512, **settings}.items()
    ]
    command = ["-m", "tests.sim.serve_timed", str(folder / "cost.json"), *flags]
    return LiveServer(command, folder / "log", ready=r"ready +on (\S+)")


async def num_waiting(url: str) -> int:
    """Return how many requests wait in the engine behind an address."""
    async with aiohttp.ClientSession() as session, session.get(url + "/metrics") as response:
        found = re.search(r"^vllm:num_requests_waiting\{[^}]*\} (\d+)", await response.text(), re.MULTILINE)
    return int(found[1]) if found is not None else 0


def test_tenants_share_a_replica_by_their_weights(tmp_path: Path) -> None:
    """All requests wait before the first one enters, so that who enters depends on no clock."""
    keys = {}
    for name, weight in (("small", 1.0), ("large", 3.0), ("holder", 1.0)):
        key = ApiKey(name, name, "", created=datetime.now(UTC), weight=weight)  # each of a tenant of its own
        keys[name] = "Bearer " + create_key(tmp_path / "keys", key)
    served: list[str] = []

    async def main(url: str) -> None:
        config = {"backends": [{"url": url}], "gateway_key": KEY, "key_file": str(tmp_path / "keys")}
        async with gateway_of(config) as live:

            async def ask(name: str, num_tokens: int = TOKENS) -> None:
                body = {"model": "quill", "prompt": "One day", "max_tokens": num_tokens, "ignore_eos": True}
                status, answer = await live.post(body, authorization=keys[name])
                assert status == 200, answer
                served.append(name)

            async def until_waiting(count: int) -> None:
                while await num_waiting(url) < count:
                    await asyncio.sleep(0.05)

            holders = [asyncio.create_task(ask("holder", MAX_LEN - 64)) for _ in range(SEATS + 1)]
            await until_waiting(1)  # the seats are taken
            asked = [asyncio.create_task(ask(name)) for name in ("small", "large") for _ in range(EACH)]
            await until_waiting(1 + len(asked))
            for task in holders:
                task.cancel()
            await asyncio.gather(*holders, return_exceptions=True)
            await asyncio.gather(*asked)

    with timed_replica(tmp_path, order="fair", max_num_seqs=SEATS, max_model_len=MAX_LEN) as replica:
        asyncio.run(asyncio.wait_for(main(replica.url), 120))
    assert len(served) == 2 * EACH
    early = Counter(served[:EACH])  # both had more work than places until then
    assert abs(early["large"] - 3 * early["small"]) <= 2 * SEATS, early
