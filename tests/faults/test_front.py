"""The process in front: it answers probes by itself, and hands over every other connection whole."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.responses import JSONResponse
from tests.e2e.live import LiveServer
from tests.faults.conftest import COMMAND, TINY
from tests.faults.probe import Probe

from quire.http import front
from quire.http.front_link import FrontLink, raw_answer
from quire.http.moved_connections import Connector

PROBE = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"


class Fronted:
    """The process with its three files, and this test as the server."""

    def __init__(self) -> None:
        self.listen = socket.create_server(("127.0.0.1", 0))
        self.control, theirs = socket.socketpair()
        self.control.settimeout(60)
        with theirs, tempfile.TemporaryFile() as file:
            file.truncate(front.STATE_BYTES)
            self.state = mmap.mmap(file.fileno(), front.STATE_BYTES)
            self.counter, self.clock = front.state_head(self.state)
            self.tell(time.monotonic())
            fds = [self.listen.fileno(), theirs.fileno(), file.fileno()]
            command = [sys.executable, "-I", str(Path(front.__file__)), *map(str, fds)]
            self.process = subprocess.Popen(command, pass_fds=fds)

    def tell(self, clock_s: float) -> None:
        raw = raw_answer(JSONResponse({"status": "ready"}))
        self.counter[0], self.clock[0] = 2, clock_s
        for i in range(len(front.PATHS)):
            front.SLOT.pack_into(self.state, front.HEAD_BYTES + i * front.SLOT.size, len(raw), raw)

    def connect(self, *pieces: bytes) -> socket.socket:
        sock = socket.create_connection(self.listen.getsockname(), 60)
        for piece in pieces:
            sock.sendall(piece)
            time.sleep(0.02)
        return sock

    def taken(self) -> bytes:
        """The first bytes of the next connection that is handed over."""
        _, fds, _, _ = socket.recv_fds(self.control, 1, 1)
        with socket.socket(fileno=fds[0]) as sock:
            sock.settimeout(0.2)
            try:
                return sock.recv(1 << 16)
            except TimeoutError:
                return b""

    def close(self) -> None:
        self.control.close()
        assert self.process.wait(60) == 0
        self.listen.close()
        self.counter.release()
        self.clock.release()
        self.state.close()


@pytest.fixture
def fronted() -> Iterator[Fronted]:
    made = Fronted()
    yield made
    made.close()


def test_probe_is_answered_by_the_front(fronted: Fronted) -> None:
    with fronted.connect(PROBE[:6], PROBE[6:]) as sock:
        assert sock.recv(4096).startswith(b"HTTP/1.1 200 OK\r\n")
        sock.sendall(PROBE * 3)  # on the same connection, pipelined
        answers = b""
        while answers.count(b'{"status":"ready"}') < 3:
            answers += sock.recv(4096)
        sock.sendall(b"GET /livez HTTP/1.1\r\nconnection: close\r\n\r\n")
        answers = b""
        while piece := sock.recv(4096):
            answers += piece
        assert b"connection: close" in answers


@pytest.mark.parametrize(
    "sent",
    [
        (b"POST /v1/completions HTTP/1.1\r\n",),
        (b"GET /live", b"zoo HTTP/1.1\r\n\r\n"),
        (b"GET /livez HTTP/1.1\r\norigin: http://page\r\n\r\n",),
        (b"GET /livez HTTP/1.1\r\ncontent-length: 1\r\n\r\n",),
        (b"GET /livez?x HTTP/1.1\r\n\r\n",),
        (b"GET /livez HTTP/1.1\r\n",),  # the rest does not come
        (b"\x16\x03\x01",),  # TLS
        (),
    ],
)
def test_any_other_connection_is_handed_over_whole(fronted: Fronted, sent: tuple[bytes, ...]) -> None:
    with fronted.connect(*sent):
        assert fronted.taken() == b"".join(sent)


def test_probe_then_request_on_one_connection(fronted: Fronted) -> None:
    request = b"POST /v1/completions HTTP/1.1\r\n\r\n"
    with fronted.connect(PROBE + request) as sock:
        assert sock.recv(4096).startswith(b"HTTP/1.1 200 OK\r\n")
        assert fronted.taken() == request


def test_stalled_server_is_not_alive(fronted: Fronted) -> None:
    fronted.tell(time.monotonic() - front.STALLED_S - 1)
    with fronted.connect(PROBE) as sock:
        assert b"503 Service Unavailable" in sock.recv(4096)


def test_a_server_that_stalls_is_first_not_ready(fronted: Fronted) -> None:
    fronted.tell(time.monotonic() - front.UNREADY_S - 1)
    with fronted.connect(PROBE) as sock:
        assert sock.recv(4096).startswith(b"HTTP/1.1 200 OK\r\n")
    with fronted.connect(PROBE.replace(b"/livez", b"/readyz")) as sock:
        assert b"503 Service Unavailable" in sock.recv(4096)


def test_a_server_that_is_long_in_writing_answers_itself(fronted: Fronted) -> None:
    fronted.counter[0] = 3
    with fronted.connect(PROBE):
        assert fronted.taken() == PROBE
    fronted.tell(time.monotonic() - front.STALLED_S - 1)
    fronted.counter[0] = 3
    with fronted.connect(PROBE) as sock:
        assert b"503 Service Unavailable" in sock.recv(4096)


def test_the_clock_is_whole_whenever_it_is_read(tmp_path: Path) -> None:
    """A clock that a reader finds half written would tell it of a server that has stalled."""
    with (tmp_path / "state").open("w+b") as file:
        file.truncate(front.STATE_BYTES)
        theirs = mmap.mmap(file.fileno(), front.STATE_BYTES)
        state = mmap.mmap(file.fileno(), front.STATE_BYTES, prot=mmap.PROT_READ)
    link = FrontLink.__new__(FrontLink)
    link.state = theirs
    link.counter, link.clock = front.state_head(theirs)
    answers = {path.decode(): JSONResponse({"status": "ready"}) for path in front.PATHS}
    link.write(answers)
    pid = os.fork()
    if pid == 0:
        until_s = time.monotonic() + 1.0
        while time.monotonic() < until_s:
            link.write(answers)
        os._exit(0)
    reader = front.Front.__new__(front.Front)
    reader.state = state
    reader.counter, reader.clock = front.state_head(state)
    expected = raw_answer(answers["/livez"])
    num_read = 0
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        assert reader.probe_answer(b"get /livez http/1.1") in (expected, None)
        num_read += 1
    assert num_read > 1000


def test_server_that_takes_none_gets_all_later(fronted: Fronted) -> None:
    """More connections than the socket between the two holds."""
    socks = [fronted.connect() for _ in range(3)]
    many = [socket.create_connection(fronted.listen.getsockname(), 60) for _ in range(600)]
    for i, sock in enumerate(many):
        sock.sendall(b"POST %d" % i)
    with fronted.connect(PROBE) as sock:
        assert sock.recv(4096).startswith(b"HTTP/1.1 200 OK\r\n")
    num_taken = 0
    while num_taken < len(many) + len(socks):
        _, fds, _, _ = socket.recv_fds(fronted.control, 1, front.FDS_AT_ONCE)
        num_taken += len(fds)
        for fd in fds:
            os.close(fd)
    for sock in (*socks, *many):
        sock.close()


def test_link_takes_what_the_front_hands_over() -> None:
    """Each connection becomes one of the server's; where the front dies, the server is told."""
    got: list[bytes] = []
    ended: list[bool] = []

    class Protocol(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            got.append(data)

    async def ask() -> dict[str, JSONResponse]:
        return {path.decode(): JSONResponse({"status": "ready"}) for path in front.PATHS}

    async def until(done: object) -> None:
        async with asyncio.timeout(60):
            while not done():  # type: ignore[operator]
                await asyncio.sleep(0.01)

    async def go() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listen:
            link = FrontLink(listen, ask, Connector(Protocol), lambda: ended.append(True))
            clients = []
            for i in range(40):
                _, writer = await asyncio.open_connection(*listen.getsockname())
                writer.write(b"hello %d" % i)
                clients.append(writer)
            await until(lambda: len(got) == 40)
            os.kill(link.pid, signal.SIGKILL)
            await until(lambda: ended)
            link.close()
            for writer in clients:
                writer.close()

    asyncio.run(go())
    assert sorted(got) == sorted(b"hello %d" % i for i in range(40))


def test_probes_hear_of_a_new_state_at_once() -> None:
    """A server that logs that it is ready is not called "starting" until the next tick."""

    async def go() -> None:
        state = ["starting"]

        async def ask() -> dict[str, JSONResponse]:
            return {path.decode(): JSONResponse({"status": state[0]}) for path in front.PATHS}

        async def probed(port: int) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(PROBE)
            answer = await reader.readuntil(b"}")
            writer.close()
            return answer

        with socket.create_server(("127.0.0.1", 0)) as listen:
            link = FrontLink(listen, ask, Connector(asyncio.Protocol), lambda: None)
            try:
                link.write(await ask())
                assert b"starting" in await probed(listen.getsockname()[1])
                state[0] = "ready"
                link.write(await ask())
                assert b"ready" in await probed(listen.getsockname()[1])
            finally:
                link.close()

    asyncio.run(go())


def front_pid(server: LiveServer) -> int:
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    return next(int(pid) for pid in children if b"front" in Path(f"/proc/{pid}/cmdline").read_bytes())


def test_live_server_answers_while_it_is_held_and_without_its_front(tmp_path: Path) -> None:
    with LiveServer(COMMAND, tmp_path / "log") as server:
        os.kill(server.process.pid, signal.SIGSTOP)  # no thread of it can answer
        try:
            with Probe(server.url) as probe:
                time.sleep(0.5)
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        assert set(probe.statuses) == {"200"}
        for path in ("/livez", "/readyz", "/health", "/startupz"):
            assert httpx.get(server.url + path).json() == {"status": "ready"}
        os.kill(front_pid(server), signal.SIGKILL)
        for _ in range(3):  # the server accepts by itself
            assert httpx.post(server.url + "/v1/completions", json=TINY, timeout=60).status_code == 200
            assert httpx.get(server.url + "/livez").json() == {"status": "ready"}
        assert "front_ended" in server.log.read_text()
        assert server.stop() == 0
