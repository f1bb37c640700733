"""What follows a request on its connection, without sockets: bodies that were never sent, and second heads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import uvicorn
from tests.api.asgi_client import app_with_jobs
from tests.api.fake_frontend import FakeFrontend

from quire.http.connections import MAX_HEAD_BYTES, WatchedProtocol
from quire.http.drain import UVICORN

GET = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n"
KEY = b"authorization: Bearer one\r\n"


class Wire(asyncio.Transport):
    """Keeps what a server writes."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    @property
    def answers(self) -> list[int]:
        """The statuses so far."""
        return [int(rest.split(b" ")[0]) for rest in self.written.split(b"HTTP/1.1 ")[1:]]


def connect(test: Callable[[WatchedProtocol, Wire], Coroutine[Any, Any, None]]) -> None:
    """Run ``test`` on a connection of a server with the API key ``one``."""

    async def main() -> None:
        config = uvicorn.Config(app_with_jobs(FakeFrontend(), api_keys=("one",)), **UVICORN)
        config.load()
        state = uvicorn.server.ServerState()
        protocol, wire = WatchedProtocol(config, state, {}, asyncio.get_running_loop()), Wire()
        protocol.connection_made(wire)
        await test(protocol, wire)
        protocol.connection_lost(None)
        await asyncio.gather(*state.tasks)

    asyncio.run(asyncio.wait_for(main(), 30))


async def answered(protocol: WatchedProtocol) -> None:
    while protocol.cycle is None or not protocol.cycle.response_complete:
        await asyncio.sleep(0)


def test_a_refusal_without_the_promised_body_closes() -> None:
    """A client that is refused keeps the body to itself: its next request would be read as that body."""

    async def test(protocol: WatchedProtocol, wire: Wire) -> None:
        expect = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 500\r\n\r\n"
        )
        protocol.data_received(expect)
        await answered(protocol)
        assert wire.answers == [401]
        assert b"connection: close" not in wire.written.lower(), "a refusal that keeps others' connections"
        assert wire.closed

    connect(test)


def test_an_answer_does_not_close_before_the_next_one() -> None:
    """The second request has promised its body; the answer to the first one has nothing to do with that."""

    async def test(protocol: WatchedProtocol, wire: Wire) -> None:
        head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2\r\n"
        protocol.data_received(GET + KEY + b"\r\n" + head + KEY + b"\r\n")
        while wire.answers != [200, 100]:
            assert not wire.closed
            await asyncio.sleep(0)
        protocol.data_received(b"{}")
        await answered(protocol)
        assert wire.answers == [200, 100, 400]
        assert not wire.closed

    connect(test)


def test_a_refusal_with_its_body_keeps_the_connection() -> None:
    async def test(protocol: WatchedProtocol, wire: Wire) -> None:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n"
        for more in (b"\r\n{}", b"expect: 100-continue\r\n\r\n{}"):
            protocol.data_received(head + more)
            await answered(protocol)
        assert wire.answers == [401, 401]
        assert not wire.closed

    connect(test)


def test_a_second_head_of_the_same_read_has_the_limit() -> None:
    async def test(protocol: WatchedProtocol, wire: Wire) -> None:
        for size, is_refused in ((MAX_HEAD_BYTES - 200, False), (MAX_HEAD_BYTES, True)):
            wire.written = b""
            second = GET + KEY + b"x: " + b"a" * size + b"\r\n\r\n"
            protocol.data_received(GET + KEY + b"\r\n" + second)
            await answered(protocol)
            assert (431 in wire.answers, wire.closed) == (is_refused, is_refused), wire.answers
            if not is_refused:
                assert wire.answers == [200, 200]

    connect(test)
