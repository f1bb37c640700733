"""`quire serve --replicas N`: how cores are shared out, what is refused, and a replica that is killed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.e2e.live import LiveServer

from quire.args import ServerArgs
from quire.errors import ConfigError
from quire_gateway.build import make_state
from quire_gateway.cli.replicas import Replicas, gateway_args, serve_replicas
from quire_gateway.config_file import gateway_config
from quire_gateway.discovery import Registration
from quire_gateway.state import GatewayState


@pytest.mark.parametrize("name", ["admin_port", "step_log", "journal", "gateway"])
def test_settings_of_one_server_are_refused(name: str) -> None:
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ConfigError, match=f"{flag} is a setting of one server .* --replicas 2"):
        serve_replicas({name: "1"}, ServerArgs(replicas=2), 2)


class Child:
    """A replica that lives until the test ends it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.stdout = asyncio.StreamReader()
        self.stdout.feed_data(b"hello\n")
        self._ended = asyncio.Event()

    async def wait(self) -> int:
        await self._ended.wait()
        return -9

    def kill(self) -> None:  # its own children keep the pipe open
        self._ended.set()

    terminate = kill


@dataclass
class Pool:
    """`Replicas` over children that the test ends, behind a gateway that runs nowhere."""

    state: GatewayState
    replicas: Replicas
    children: list[Child] = field(default_factory=list)  # in the order of their start
    pauses: list[float] = field(default_factory=list)
    has_stopped: bool = False
    now_s: float = 0.0

    async def start(self, path: Path, cores: set[int]) -> Any:
        self.children.append(Child(100 + len(self.children)))
        return self.children[-1]

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += 1.0

    def stop(self) -> None:
        self.has_stopped = True

    def serves(self, child: Child) -> None:
        """A child has loaded and registered."""
        name, about = f"r{child.pid}", {"pid": child.pid}
        backend = self.state.discovery.register(
            Registration(name, f"http://{name}", ("m",), 1e9, about=about)
        )
        self.state.fleet.set_ready(backend, True, "", 0.0)

    async def dies(self, child: Child) -> None:
        """Kill one, and wait until another one is started or the server stops."""
        num = len(self.children)
        child.kill()
        async with asyncio.timeout(60):
            while len(self.children) == num and not self.has_stopped:
                await asyncio.sleep(0)


@asynccontextmanager
async def pool_of(
    num: int, monkeypatch: pytest.MonkeyPatch, max_restarts: int = 3
) -> AsyncGenerator[Pool, None]:
    monkeypatch.setattr("quire_gateway.cli.replicas._LAST_LINES_S", 0.0)
    state = make_state(gateway_config({}), lambda: 0.0, 0)
    pool = Pool(
        state, Replicas({}, [set()] * num, max_restarts, lambda: pool.now_s, lambda *a: pool.start(*a))
    )
    monkeypatch.setattr(pool.replicas, "_pause", pool.pause)
    async with pool.replicas.running(state, "http://gateway", pool.stop):
        async with asyncio.timeout(60):
            while len(pool.children) < num:
                await asyncio.sleep(0)
        yield pool


def test_deaths_while_loading_are_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with pool_of(2, monkeypatch, max_restarts=1) as pool:
            pool.serves(pool.children[0])
            for _ in range(9):  # far beyond max_restarts: the other one serves
                await pool.dies(pool.children[-1])
            assert not pool.has_stopped
            assert pool.pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
            assert [backend.name for backend in pool.state.fleet] == ["r100"]
            pool.now_s += 1000.0
            await pool.dies(pool.children[-1])
            assert pool.pauses[-1] == 0.25, "what is long ago counts no more"
        assert pool.replicas.status == 0

    asyncio.run(main())


def test_a_dead_replica_gets_nothing_from_that_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with pool_of(2, monkeypatch) as pool:
            for child in tuple(pool.children):
                pool.serves(child)
            await pool.dies(pool.children[1])
            assert [backend.name for backend in pool.state.fleet] == ["r100"]

    asyncio.run(main())


def test_replicas_that_cannot_start_end_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with pool_of(2, monkeypatch) as pool:
            first, second = pool.children
            first.kill()
            second.kill()  # before the first is back
            async with asyncio.timeout(60):
                while not pool.has_stopped:
                    await asyncio.sleep(0)
        assert pool.replicas.status == 1

    asyncio.run(main())


def test_the_last_replica_has_max_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with pool_of(1, monkeypatch, max_restarts=3) as pool:
            pool.serves(pool.children[0])
            for _ in range(4):
                await pool.dies(pool.children[-1])
            assert (pool.has_stopped, len(pool.children)) == (True, 4)

    asyncio.run(main())


def test_the_gateway_in_front_has_the_rules_for_pages() -> None:
    args = ServerArgs(cors_origins="https://ui.example.com, app://x", allowed_hosts="llm.example.com")
    rules = gateway_args(args, "k").browser_rules
    assert rules.origins == ("https://ui.example.com", "app://x")
    assert rules.hosts == ("llm.example.com",)


SERVED = ["-m", "quire.cli", "serve", "quill", "--port", "0", "--num-kv-blocks", "256", "--threads", "1"]
TWO_READY = r"(?s)gateway listening url=(\S+).*backend_ready.*backend_ready"
# What differs from one process, or one request, to the next.
PASSING = {"created", "timings", "timing", "id", "modified_at", "build_info", "fingerprint"}
ASKS: list[tuple[str, dict[str, Any] | None]] = [
    ("/v1/models", None),
    ("/v1/models/quill", None),
    ("/props", None),
    ("/tokenizer_info", None),
    ("/openapi.json", None),
    ("/docs", None),
    ("/api/show", {"model": "quill"}),
    ("/completion", {"prompt": "It was", "n_predict": 6, "temperature": 0}),
    ("/completion", {"prompt": "It was", "n_predict": 6, "temperature": 0, "stream": True}),
    ("/infill", {"input_prefix": "It was", "input_suffix": ".", "n_predict": 4, "temperature": 0}),
    ("/generate", {"inputs": "It was", "parameters": {"max_new_tokens": 6, "details": True}}),
    ("/generate_stream", {"inputs": "It was", "parameters": {"max_new_tokens": 6}}),
]


def lasting_part(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: lasting_part(each) for name, each in value.items() if name not in PASSING}
    return [lasting_part(each) for each in value] if isinstance(value, list) else value


def answer_of(server: LiveServer, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
    """Return the status and the parts of an answer that are the same at every server; of a stream, text and end."""
    found = httpx.request("GET" if body is None else "POST", server.url + path, json=body, timeout=60)
    if found.headers["content-type"].startswith("text/event-stream"):
        events = [json.loads(each[6:]) for each in found.text.split("\n\n") if each.startswith("data: {")]
        text = "".join(each.get("content", each.get("token", {}).get("text")) for each in events)
        return found.status_code, (text, lasting_part(events[-1] | {"token": None}))
    is_json = "json" in found.headers["content-type"]
    return found.status_code, lasting_part(found.json()) if is_json else found.text


@pytest.mark.slow
def test_replicas_answer_as_a_single_server(tmp_path: Path) -> None:
    """With Quill: what both have, and twice, so that both replicas were asked."""
    with (
        LiveServer(SERVED, tmp_path / "one.log") as single,
        LiveServer([*SERVED, "--replicas", "2"], tmp_path / "two.log", ready=TWO_READY) as two,
    ):
        for path, body in ASKS:
            status, expected = answer_of(single, path, body)
            assert status == (400 if path == "/infill" else 200), "Quill does not fill in the middle"
            for _ in range(2):
                again, found = answer_of(two, path, body)
                assert again == status
                if path == "/openapi.json":  # the gateway lacks some paths, and has some of its own
                    own = {name: each for name, each in expected["paths"].items() if name in found["paths"]}
                    assert {"/v1/chat/completions", "/props", "/tokenizer_info"} <= own.keys()
                    assert own.items() <= found["paths"].items()
                elif path == "/docs":
                    assert "/openapi.json" in found
                else:
                    assert found == expected, path
        card = httpx.get(two.url + "/v1/models").json()["data"][0]
        assert card["created"] > 0
        assert card["max_model_len"] > 0


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
    """Return the pids of the replicas of a server, one a line."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            is_child = stat.read_text().rpartition(")")[2].split()[1] == str(pid)
            if is_child and b"front" not in stat.with_name("cmdline").read_bytes():  # which answers probes
                found.append(stat.parent.name)
        except OSError:
            continue
    return "\n".join(found)
