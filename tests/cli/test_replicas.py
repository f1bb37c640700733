"""`quire serve --replicas N`: how cores are shared out, what is refused, and a replica that is killed."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import httpx
import pytest
from tests.e2e.live import LiveServer

from quire.args import ServerArgs
from quire.cli.replicas import serve_replicas
from quire.errors import ConfigError


@pytest.mark.parametrize("name", ["admin_port", "step_log", "cors_origins", "gateway"])
def test_settings_of_one_server_are_refused(name: str) -> None:
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ConfigError, match=f"{flag} is a setting of one server .* --replicas 2"):
        serve_replicas({name: "1"}, ServerArgs(replicas=2), 2)


@pytest.mark.slow
def test_a_killed_replica_is_not_seen_and_started_again(tmp_path: Path) -> None:
    command = [
        "-m",
        "quire.cli",
        "serve",
        "quill",
        "--port",
        "0",
        "--replicas",
        "2",
        "--num-kv-blocks",
        "256",
    ]
    ready = r"(?s)gateway listening url=(\S+).*backend_ready.*backend_ready"
    with LiveServer(command, tmp_path / "log", ready=ready) as server:
        pids = re.findall(r"^(\d+)", _children(server.process.pid), re.MULTILINE)
        assert len(pids) == 2
        os.kill(int(pids[0]), signal.SIGKILL)
        body = {"model": "quill", "prompt": "It was", "max_tokens": 4, "seed": 1}
        answers = [httpx.post(server.url + "/v1/completions", json=body, timeout=60) for _ in range(10)]
        assert [answer.status_code for answer in answers] == [200] * 10
        assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
        end = time.monotonic() + 90
        while server.log.read_text().count("backend_ready") < 3:
            assert time.monotonic() < end, server.log.read_text()
            time.sleep(0.2)
        assert server.stop() == 0
        assert not _children(server.process.pid)


def _children(pid: int) -> str:
    """Return the pids of the children of a process, one a line."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if stat.read_text().rpartition(")")[2].split()[1] == str(pid):
                found.append(stat.parent.name)
        except OSError:
            continue
    return "\n".join(found)
