"""Prompts are warm after a server with a tier on disk was killed, in one with the same Redis, and with a peer."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.e2e.live import LiveServer
from tests.gateway.services import free_port, redis_server, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
PROMPT = "It was a dark and stormy night, and the rain fell in torrents. " * 30


def serve(log: Path, *tier: str) -> LiveServer:
    return LiveServer(["-m", "quire.cli", "serve", "quill", "--port", "0", "--threads", "1", *tier], log)


def ask(server: LiveServer, prompt: str = PROMPT, **more: Any) -> tuple[str, dict[str, Any]]:
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "timing": True, **more}
    answer = httpx.post(server.url + "/v1/completions", json=body, timeout=60.0).raise_for_status().json()
    return answer["choices"][0]["text"], answer["timing"]


def prefilled(server: LiveServer, prompt: str) -> dict[str, Any]:
    """Have a server compute a prompt, and return the params of the call that answers it."""
    body = {"prompt": prompt, "kv_transfer_params": {"do_remote_decode": True}}
    answer = httpx.post(server.url + "/v1/completions", json=body, timeout=60.0).raise_for_status().json()
    assert answer["usage"]["completion_tokens"] == 0
    params: dict[str, Any] = answer["kv_transfer_params"]
    return params


def tree(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in tree(int(child)))]


def wait_until_stored(folder: Path) -> None:
    """The bytes of the segments stop growing."""
    before, until_s = -1, time.monotonic() + 30.0
    while time.monotonic() < until_s:
        size = sum(path.stat().st_blocks for path in folder.rglob("*.seg"))
        if size and size == before:
            return
        before = size
        time.sleep(0.5)
    raise AssertionError("nothing was stored")


def test_a_prompt_is_warm_after_kill_9(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    tier = "--kv-disk", f"{folder}:64MiB"
    with serve(tmp_path / "first", *tier) as server:
        text, timing = ask(server)
        assert timing["cached_tokens"] == 0
        wait_until_stored(folder)
        for pid in tree(server.process.pid):
            os.kill(pid, signal.SIGKILL)
    assert all(path.stat().st_mode & 0o077 == 0 for path in (folder, *folder.rglob("*")))
    with serve(tmp_path / "second", *tier) as server:
        again, timing = ask(server)
        assert again == text
        assert timing["cached_tokens"] == timing["loaded_tokens"] > 200
        _, timing = ask(server)
        assert timing["cached_tokens"] > 200
        assert timing["loaded_tokens"] == 0, "it is in memory now"


def test_a_second_server_finds_what_the_first_put_into_redis(tmp_path: Path) -> None:
    redis = pytest.importorskip("redis")
    with redis_server() as started, redis.Redis.from_url(started.url) as client:
        tier = "--kv-remote", started.url
        with serve(tmp_path / "first", *tier) as first, serve(tmp_path / "second", *tier) as second:
            text, timing = ask(first)
            assert timing["loaded_tokens"] == 0
            full = timing["prompt_tokens"] // 16  # blocks
            wait_until(lambda: client.dbsize() > full, "storing in Redis")  # and the index
            time.sleep(2.5)  # engines look for new blocks once per second
            again, timing = ask(second)
            assert again == text
            assert timing["cached_tokens"] == timing["loaded_tokens"] > 200
            started.kill()
            other = httpx.post(
                second.url + "/v1/completions", json={"prompt": PROMPT[1:], "max_tokens": 3}, timeout=60.0
            )
            assert other.status_code == 200, "a server that is gone costs a computation"


def test_a_peer_gives_its_blocks_until_it_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_KV_SECRET", "the secret of two servers")
    port, other_port = free_port(), free_port()
    peers = "--kv-share", f"127.0.0.1:{other_port}:64MiB", "--kv-peers", f"127.0.0.1:{port}"
    with serve(tmp_path / "first", "--kv-share", f"127.0.0.1:{port}:64MiB") as first:
        text, timing = ask(first)
        assert timing["loaded_tokens"] == 0
        with serve(tmp_path / "second", *peers) as second:
            again, timing = ask(second)
            assert again == text
            assert timing["cached_tokens"] == timing["loaded_tokens"] > 200
            params = prefilled(first, "And " + PROMPT)
            text, timing = ask(second, "And " + PROMPT, kv_transfer_params=params)
            assert timing["prefill_remote_tokens"] == timing["cached_tokens"] > 200
            again, timing = ask(first, "And " + PROMPT)
            assert again == text
            params = prefilled(first, "Then " + PROMPT)
            for pid in tree(first.process.pid):
                os.kill(pid, signal.SIGKILL)
            # What is known of the peer, and told by the request, is wrong now.
            _, timing = ask(second, "Then " + PROMPT, kv_transfer_params=params)
            assert timing["prefill_remote_tokens"] == 0
            other = httpx.post(
                second.url + "/v1/completions", json={"prompt": PROMPT[1:], "max_tokens": 3}, timeout=60.0
            )
            assert other.status_code == 200, "a peer that is gone costs a computation"
