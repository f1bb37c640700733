"""A server with a tier on disk that is killed: the next one has its prompts warm, and says the same."""

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

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
PROMPT = "It was a dark and stormy night, and the rain fell in torrents. " * 30


def serve(folder: Path, log: Path) -> LiveServer:
    command = [
        "-m",
        "quire.cli",
        "serve",
        "quill",
        "--port",
        "0",
        "--threads",
        "1",
        "--kv-disk",
        f"{folder}:64MiB",
    ]
    return LiveServer(command, log)


def ask(server: LiveServer) -> tuple[str, dict[str, Any]]:
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "timing": True}
    answer = httpx.post(server.url + "/v1/completions", json=body, timeout=60.0).raise_for_status().json()
    return answer["choices"][0]["text"], answer["timing"]


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
    with serve(folder, tmp_path / "first") as server:
        text, timing = ask(server)
        assert timing["cached_tokens"] == 0
        wait_until_stored(folder)
        for pid in tree(server.process.pid):
            os.kill(pid, signal.SIGKILL)
    assert all(path.stat().st_mode & 0o077 == 0 for path in (folder, *folder.rglob("*")))
    with serve(folder, tmp_path / "second") as server:
        again, timing = ask(server)
        assert again == text
        assert timing["cached_tokens"] == timing["disk_tokens"] > 200
        _, timing = ask(server)
        assert timing["cached_tokens"] > 200
        assert timing["disk_tokens"] == 0, "it is in memory now"
