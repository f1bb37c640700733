"""Two servers behind a gateway: one computes prompts, the other answers, and neither's death changes a token."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.live import LiveServer
from tests.e2e.test_e2e_kv_tier import tree
from tests.gateway.live import Live, gateway_of
from tests.gateway.services import free_port

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
STORY = "It was a dark and stormy night, and the rain fell in torrents. "
STORED = "quire:kv_blocks_stored_total"


def body_of(number: int, length: int = 30, **more: Any) -> dict[str, Any]:
    prompt = f"Chapter {number}. {STORY * length}"
    return {"model": "quill", "prompt": prompt, "max_tokens": 12, "temperature": 0, "timing": True, **more}


async def ask(live: Live, url: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    async with live.session.post(url + "/v1/completions", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return answer["choices"][0]["text"], answer["timing"]


def test_prompts_are_computed_by_one_server_and_answered_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_KV_SECRET", "the secret of two servers")
    port, other = free_port(), free_port()
    command = [
        "-m",
        "quire.cli",
        "serve",
        "quill",
        "--port",
        "0",
        "--threads",
        "1",
        "--gateway-key",
        "between-us",
    ]
    shares = ["--kv-share", f"127.0.0.1:{port}:64MiB", "--max-num-batched-tokens", "16"]
    takes = ["--kv-share", f"127.0.0.1:{other}:64MiB", "--kv-peers", f"127.0.0.1:{port}"]

    async def main(prefill: LiveServer, decode: LiveServer) -> None:
        config = {
            "gateway_key": "between-us",
            "backends": [
                {"name": "prefill", "url": prefill.url, "role": "prefill"},
                {"name": "decode", "url": decode.url, "role": "decode"},
            ],
            "disaggregation": {"min_tokens": 100},
        }
        async with gateway_of(config) as live:
            text, timing = await ask(live, live.url, body_of(1))
            assert timing["prefill_remote_tokens"] == timing["cached_tokens"] > 200
            assert (await ask(live, prefill.url, body_of(1)))[0] == text
            # A conversation that goes on stays where it is.
            _, timing = await ask(live, live.url, body_of(1) | {"prompt": body_of(1)["prompt"] + text})
            assert "prefill_remote_tokens" not in timing
            assert timing["cached_tokens"] > 200

            stored = prefill.metric(STORED)
            processes = tree(prefill.process.pid)
            asking = asyncio.create_task(ask(live, live.url, body_of(2, 200)))
            while await asyncio.to_thread(prefill.metric, STORED) == stored:
                assert not asking.done()
            for pid in processes:
                os.kill(pid, signal.SIGKILL)
            text, timing = await asking
            assert timing["prompt_tokens"] > timing["cached_tokens"] + 100, "the rest was computed here"
            # Alone, on the one that is left, in a cache of its own.
            assert (await ask(live, decode.url, body_of(2, 200, cache_salt="alone")))[0] == text
            text, _ = await ask(live, live.url, body_of(3))
            assert (await ask(live, decode.url, body_of(3, cache_salt="alone")))[0] == text

    with (
        LiveServer([*command, *shares], tmp_path / "prefill") as prefill,
        LiveServer([*command, *takes], tmp_path / "decode") as decode,
    ):
        asyncio.run(asyncio.wait_for(main(prefill, decode), 240))
