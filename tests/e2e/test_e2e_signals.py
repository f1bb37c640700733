"""A real server from its first line to the second Ctrl-C: the block that ends the start, and recordings by a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from tests.e2e.live import LiveServer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
WAIT_S = 60.0
READY = r"ready    in \S+ s on (http://\S+)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("signals")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    command = [
        "-m",
        "quire.cli",
        "serve",
        "quill",
        "--port",
        "0",
        "--threads",
        "1",
        "--drain-timeout-s",
        "600",
        "--record-dir",
        str(folder),
    ]
    live = LiveServer(command, folder / "log", ready=READY + r"[\s\S]*max_tokens")
    yield live
    live.stop()


def log_of(server: LiveServer) -> str:
    return server.log.read_text(errors="replace")


def until(holds: Callable[[], bool]) -> bool:
    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s:
        if holds():
            return True
        time.sleep(0.05)
    return False


def tree(pid: int) -> list[int]:
    """Return the processes that have begun from ``pid``, and that one."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in tree(int(child)))]


def test_the_start_ends_in_one_block_that_begins_with_the_address(server: LiveServer) -> None:
    said = log_of(server)
    assert said.startswith("loading  quill …\n")
    block = said[said.index("\n\nready ") + 2 :].rstrip("\n").splitlines()
    assert block[0].endswith(server.url)
    assert [line.split()[0] for line in block if line.strip() and line[0] != " "] == [
        "ready", "model", "tools", "exact", "cache", "stop",
    ]  # fmt: skip
    assert block[-2].startswith(f"  curl {server.url}/v1/chat/completions")
    assert "rms_norm" not in said  # the names of kernels


def test_sigusr2_to_any_process_saves_a_recording(server: LiveServer, folder: Path) -> None:
    httpx.post(server.url + "/v1/completions", json={"prompt": "It was", "max_tokens": 4}).raise_for_status()
    processes = tree(server.process.pid)
    assert len(processes) >= 3  # API, engine, front
    assert until(lambda: all("quire: " in Path(f"/proc/{p}/cmdline").read_text() for p in processes))
    for number, process in enumerate(processes, 1):
        os.kill(process, signal.SIGUSR2)
        assert until(lambda number=number: len(list(folder.glob("*.rec"))) == number), process  # type: ignore[misc]
    assert httpx.get(server.url + "/livez").status_code == 200


def test_ctrl_c_says_that_another_one_stops_at_once(server: LiveServer) -> None:
    body = {"prompt": "It was", "max_tokens": 8000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=WAIT_S) as answer:
        next(answer.iter_raw())
        server.process.send_signal(signal.SIGINT)
        assert until(lambda: "Ctrl-C again stops at once" in log_of(server))
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGINT)
        try:
            server.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            pytest.fail("the second Ctrl-C was not heard")
    assert "Traceback" not in log_of(server)
