"""Clients that send half a request or read nothing: they are cut off, told why in the log, and delay no shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from urllib.parse import urlsplit

from starlette.types import Receive, Scope, Send
from tests.e2e.live import LiveServer
from tests.faults.conftest import COMMAND
from tests.faults.probe import Probe

from quire.http.connections import Patience
from quire.http.drain import DrainingServer
from quire.http.listen import bind

SHORT = Patience(head_s=0.6, body_s=0.6, body_rate=1000.0, write_s=0.8)
HEAD = b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n"
GET = b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n"


class App:
    """Streams without end on /endless; reads the body and answers on other paths."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        if scope["path"] == "/endless":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            watching = asyncio.create_task(self._watch(receive))
            while not watching.done():
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
                await asyncio.sleep(0)
            self.ended.append("endless")
            return
        message = {"more_body": True}
        while message.get("more_body"):
            message = await receive()
        self.ended.append(message["type"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            continue


@contextlib.asynccontextmanager
async def served(app: App, cuts: list[str]) -> AsyncGenerator[int, None]:
    async def drain() -> None:
        return

    server = DrainingServer(app, drain, on_cut=cuts.append, patience=SHORT)
    sock = bind("127.0.0.1", 0)
    serving = asyncio.create_task(server.serve([sock]))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield sock.getsockname()[1]
    finally:
        server.should_exit = True
        await serving


def test_half_sent_requests_time_out() -> None:
    """Also a connection that a browser opened ahead and sent nothing over, which ends without an answer."""
    sent = {"nothing": b"", "half a head": b"POST /x HT", "half a body": HEAD + b"abc"}
    cuts: list[str] = []

    async def answer(port: int, part: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(part)
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        return answer

    async def answers() -> list[bytes]:
        async with served(App(), cuts) as port:
            return await asyncio.gather(*(answer(port, part) for part in sent.values()))

    got = dict(zip(sent, asyncio.run(answers()), strict=True))
    assert got["nothing"] == b""
    assert b"408" in got["half a head"]
    assert b"408" in got["half a body"]
    assert cuts == ["half_request"] * 2


def test_a_slow_but_steady_body_is_waited_for() -> None:
    async def body() -> bytes:
        async with served(App(), []) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEAD.replace(b"1000000", b"6000"))
            for _ in range(12):
                await asyncio.sleep(0.15)
                writer.write(b"x" * 500)
            answer = await asyncio.wait_for(reader.readline(), 60)
            writer.close()
            return answer

    assert b"200" in asyncio.run(body())


def test_a_client_that_reads_nothing_is_cut() -> None:
    app, cuts = App(), list[str]()

    async def body() -> None:
        async with served(app, cuts) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
            writer.write(GET)
            deadline = time.monotonic() + 60
            while not app.ended and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
            writer.close()
            del reader

    asyncio.run(body())
    assert app.ended == ["endless"]
    assert cuts == ["slow_reader"]


def test_sigterm_beside_300_half_sent_is_quiet(tmp_path: Path) -> None:
    command = [*COMMAND, "--drain-timeout-s", "600"]
    with LiveServer(command, tmp_path / "log") as live, contextlib.ExitStack() as open_sockets:
        parts = urlsplit(live.url)
        body = json.dumps({"prompt": "x" * 1000}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body) + 9}\r\n\r\n".encode()
        for i in range(300):
            sock = open_sockets.enter_context(socket.create_connection((parts.hostname, parts.port), 30))
            sock.sendall((head + body)[: 20 if i % 3 == 0 else None])
        with Probe(live.url) as probe:
            time.sleep(1)
        assert probe.statuses == {"200": len(probe.latencies_ms)}
        assert live.stop() == 0
        text = live.log.read_text()
        assert "Traceback" not in text
        assert "Cancelled" not in text
