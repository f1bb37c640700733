"""Tenants share a replica by the weights of their keys, which travel through the gateway."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.live import LiveServer
from tests.gateway.live import gateway_of
from tests.gateway.test_tenants import make_keys

from quire.errors import ModelLoadError
from quire.http.keys import ApiKey, create_key, read_keys
from quire.models.hub import quill_path
from quire.plan.cost_model import CostModel

KEY = "between-us"
STEP_S = 0.004
TOKENS = 16


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


def test_tenants_share_a_replica_by_their_weights(tmp_path: Path) -> None:
    keys = make_keys(tmp_path, small={})
    heavy = ApiKey("large", "other", "", created=next(iter(read_keys(tmp_path / "keys").keys.values())).created,
                   weight=3.0)  # fmt: skip
    keys["large"] = "Bearer " + create_key(tmp_path / "keys", heavy)
    served: Counter[str] = Counter()

    async def main(url: str) -> None:
        config = {"backends": [{"url": url}], "gateway_key": KEY, "key_file": str(tmp_path / "keys")}
        async with gateway_of(config) as live:

            async def ask(name: str) -> None:
                body = {"model": "quill", "prompt": "One day", "max_tokens": TOKENS, "ignore_eos": True}
                while served.total() < 120:
                    status, answer = await live.post(body, authorization=keys[name])
                    assert status == 200, answer
                    served[name] += 1

            await asyncio.gather(*(ask(name) for name in ("small", "large") for _ in range(12)))

    with timed_replica(tmp_path, order="fair", max_num_seqs=4) as replica:
        asyncio.run(asyncio.wait_for(main(replica.url), 120))
    # Both had more work than places all the time; what ends behind the last of the 120 belongs to either.
    assert 2.0 < served["large"] / served["small"] < 4.0, served
