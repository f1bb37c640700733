"""A new server takes the address over from a running one: nothing is refused, reset, lost or done twice."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import ssl
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from tests.api.fake_frontend import ANSWER
from tests.api.test_api_batches import begin, connected, line, rows, wait
from tests.api.test_api_server import pem as pem
from tests.e2e.live import LiveServer
from tests.faults.processes import wait_for

from quire.args import EngineArgs
from quire.cli.serve import configured
from quire.errors import ConfigError
from quire.http import takeover as takeover_side
from quire.http.handover import handover_path
from quire.http.takeover import Takeover

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """A free port, and a runtime folder of this test's own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def server(folder: Path, port: int, how: str, *more: str) -> Iterator[LiveServer]:
    log = folder / f"{how}-{len(list(folder.glob('*.log')))}.log"
    command = ["-m", "tests.faults.serve_handover", str(port), how, *(more or ("40", ""))]
    with LiveServer(command, log) as live:
        yield live


def pid_at(url: str, **client: Any) -> int:
    return int(httpx.get(url + "/version", **client).json()["version"])


class Crowd:
    """Clients that ask without a pause: on new connections, on kept ones, and probes; and long streams."""

    def __init__(self, url: str, trusted: ssl.SSLContext | None = None) -> None:
        self.url = url
        self.seen: Counter[str] = Counter()
        self.pids: list[set[str]] = []
        self._trusted = trusted
        self._stop = False

    async def __aenter__(self) -> Crowd:
        kinds = ("new", "kept", "kept", "probe")
        self._tasks = [asyncio.create_task(self._ask(kind)) for kind in kinds]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop = True
        await asyncio.gather(*self._tasks)

    def session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self._trusted or False))

    async def _ask(self, kind: str) -> None:
        path = "/livez" if kind == "probe" else "/version"
        while not self._stop:
            async with self.session() as session:
                while not self._stop:
                    async with session.get(self.url + path) as response:
                        assert response.status == 200, await response.text()
                        self.seen[kind] += 1
                        if kind != "probe":
                            self.seen[(await response.json())["version"]] += 1
                    if kind == "new":
                        break

    async def stream(self) -> tuple[str, str]:
        """The text of a stream, and the process that answers on the same connection after it."""
        async with self.session() as session:
            async with session.post(self.url + PATH, json={**CHAT, "stream": True}) as response:
                lines = (await response.text()).split("\n\n")
            deltas = [json.loads(each[6:])["choices"] for each in lines if each.startswith("data: {")]
            text = "".join(one[0]["delta"].get("content") or "" for one in deltas if one)
            async with session.get(self.url + "/version") as response:
                return text, (await response.json())["version"]


async def over(crowd: Crowd, old: LiveServer, folder: Path, port: int, *more: str) -> int:
    """Hand over beside a crowd; return the exit status of the old server."""
    with ExitStack() as stack:
        starting = asyncio.create_task(
            asyncio.to_thread(stack.enter_context, server(folder, port, "takes", *more))
        )
        streams = []
        while not starting.done():
            streams.append(asyncio.create_task(crowd.stream()))
            await asyncio.wait([starting], timeout=0.2)
        new = await starting
        streams.append(asyncio.create_task(crowd.stream()))
        begun = crowd.seen.copy()
        assert str(old.process.pid) in begun
        assert old.process.poll() is None, "no stream was running"
        ended = await asyncio.gather(*streams)
        assert {text for text, _ in ended} == {ANSWER}
        assert ended[-1][1] == str(new.process.pid)
        status = await asyncio.to_thread(old.process.wait, 30)
        before = crowd.seen[str(new.process.pid)]
        while crowd.seen[str(new.process.pid)] < before + 20:
            await asyncio.sleep(0.01)
        crowd._stop = True
        await asyncio.gather(*crowd._tasks)
        assert crowd.seen["kept"] > begun["kept"]
        assert crowd.seen["probe"] > begun["probe"]
        return status


def test_nothing_is_refused_or_reset_in_a_handover(tmp_path: Path, port: int) -> None:
    with server(tmp_path, port, "binds", "150", "") as old:

        async def go() -> int:
            async with Crowd(old.url) as crowd:
                return await over(crowd, old, tmp_path, port)

        assert asyncio.run(go()) == 0, old.log.read_text()
        assert "handed_over" in old.log.read_text()


@pytest.mark.slow
def test_tls_is_handed_over_too(tmp_path: Path, port: int, pem: tuple[str, str]) -> None:
    with server(tmp_path, port, "binds", "150", "", *pem) as old:

        async def go() -> int:
            crowd = Crowd(old.url, ssl.create_default_context(cafile=pem[0]))
            async with crowd:
                return await over(crowd, old, tmp_path, port, "40", "", *pem)

        assert asyncio.run(go()) == 0, old.log.read_text()


@pytest.mark.slow
def test_old_server_goes_on_where_the_new_one_fails(tmp_path: Path, port: int) -> None:
    with server(tmp_path, port, "binds") as old:
        with pytest.raises(AssertionError, match="start_failed"), server(tmp_path, port, "fails"):
            pass
        assert pid_at(old.url) == old.process.pid
        assert httpx.post(old.url + PATH, json=CHAT).json()["choices"][0]["message"]["content"] == ANSWER
        with server(tmp_path, port, "takes") as new:
            assert pid_at(old.url) == new.process.pid
            assert old.process.wait(60) == 0
            with server(tmp_path, port, "takes") as third:
                assert pid_at(old.url) == third.process.pid


@pytest.mark.slow
def test_old_server_accepts_again_where_the_new_one_dies(tmp_path: Path, port: int) -> None:
    with server(tmp_path, port, "binds", "5", str(tmp_path / "batches")) as old:
        with httpx.Client(base_url=old.url) as kept:
            assert kept.get("/version").status_code == 200
            takeover = Takeover.from_address(("127.0.0.1", port))
            takeover.take()
            takeover.sockets["api"].close()
            with socket.create_connection(("127.0.0.1", port)) as waiting:  # in the kernel's queue
                waiting.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                takeover.close()
                waiting.settimeout(60)
                assert waiting.recv(100).startswith(b"HTTP/1.1 200")
            assert kept.get("/version").status_code == 200
        assert pid_at(old.url) == old.process.pid
        assert "the new server has ended" in old.log.read_text()


@pytest.mark.slow
def test_jobs_move_and_run_once(tmp_path: Path, port: int) -> None:
    folder = str(tmp_path / "batches")
    with server(tmp_path, port, "binds", "60", folder) as old, connected(old.url) as client:
        first = client.responses.create(model="tiny", input="hi")
        batch = begin(client, *(line(f"line-{i}") for i in range(24)))
        waiting = client.responses.create(model="tiny", input="hi", background=True)
        wait_for(lambda: (client.batches.retrieve(batch.id).request_counts or batch).completed > 2)  # type: ignore[union-attr]
        with server(tmp_path, port, "takes", "5", folder) as new:
            assert pid_at(new.url) == new.process.pid
            ended = wait(client, batch.id)
            assert ended.request_counts is not None
            assert (ended.status, ended.request_counts.completed) == ("completed", 24)
            assert len(rows(client, ended.output_file_id)) == 24
            wait_for(lambda: client.responses.retrieve(waiting.id).status == "completed")
            assert client.responses.retrieve(waiting.id).output_text == ANSWER
            after = client.responses.create(model="tiny", input="more", previous_response_id=first.id)
            assert after.status == "completed"
            assert old.process.wait(60) == 0
            assert not list(Path(folder, "background").iterdir())


@pytest.mark.slow
def test_background_response_outlives_its_server(tmp_path: Path, port: int) -> None:
    folder = str(tmp_path / "batches")
    with server(tmp_path, port, "binds", "200", folder) as old, connected(old.url) as client:
        begun = client.responses.create(model="tiny", input="hi", background=True, metadata={"a": "b"})
        done = client.responses.create(model="tiny", input="", background=True, max_output_tokens=1)
        wait_for(lambda: client.responses.retrieve(done.id).status == "incomplete")
        old.process.send_signal(signal.SIGKILL)
        old.process.wait()
    with server(tmp_path, port, "binds", "1", folder) as new, connected(new.url) as client:
        wait_for(lambda: client.responses.retrieve(begun.id).status == "completed")
        again = client.responses.retrieve(begun.id)
        assert (again.output_text, again.metadata, again.created_at) == (ANSWER, {"a": "b"}, begun.created_at)
        assert client.responses.retrieve(done.id).status == "incomplete"
        client.responses.delete(done.id)
        new.process.send_signal(signal.SIGTERM)
        assert new.process.wait(60) == 0
    assert [path.stem for path in Path(folder, "responses").iterdir()] == [begun.id]


def test_nothing_to_take_over_is_one_clear_line(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    address = ("127.0.0.1", port)
    with pytest.raises(ConfigError, match=f"no server listens on 127.0.0.1:{port}"):
        Takeover.from_address(address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(handover_path(address)))
    with pytest.raises(ConfigError, match=r"its last server is dead.*Start without --handover"):
        Takeover.from_address(address)
    with socket.create_server(address):
        with pytest.raises(ConfigError, match="no running `quire serve`"):
            Takeover.from_address(address)
        monkeypatch.setattr(takeover_side, "_listener_user", lambda port: 65534)
        with pytest.raises(ConfigError, match="process of the user nobody; only a server of the same user"):
            Takeover.from_address(address)
    handover_path(address).parent.chmod(0o755)
    with pytest.raises(ConfigError, match="this user's alone"):
        Takeover.from_address(address)


def test_memory_for_one_engine_is_one_clear_line(port: int) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        takeover = Takeover({"pid": os.getpid(), "engine_bytes": 2**50}, {}, ours)
        with pytest.raises(ConfigError, match=r"memory does not hold both engines.*process \d+.*goes on"):
            configured(EngineArgs(model="quill"), takeover)
        takeover.close()
