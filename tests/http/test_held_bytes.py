"""What clients have sent and a process holds is bounded in sum, and its memory is given back."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import pytest
from starlette.types import Message, Receive, Scope, Send
from tests.gateway.live import Received, Scripted, gateway, says

from quire.engine.large_body import parse
from quire.http import held_bytes, memory
from quire.http.body import HELD_BODY, read_bytes, read_json, send_json
from quire.http.held_bytes import LARGE, MESSAGES, SMALL, HeldBodies
from quire.http.memory import EVERY_S, GROWTH_BYTES, MemoryReturn
from quire.http.refusals import HttpError

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert (LARGE.num_bytes, SMALL.num_bytes, MESSAGES.num_bytes) == (0, 0, 0)


class Client:
    """One request to an application behind `HeldBodies`, sent piece by piece; ``ends`` lets the application go on."""

    def __init__(self, *, declared: int | None = None, kind: bytes = b"application/json") -> None:
        self.pieces: asyncio.Queue[tuple[int, bool]] = asyncio.Queue()
        self.ends = asyncio.Event()
        self.error: HttpError | None = None
        self.num_read = 0
        self.early = False  # the application releases the body when it has read it
        headers = [(b"content-type", kind)]
        if declared is not None:
            headers.append((b"content-length", b"%d" % declared))
        scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
        self.task = asyncio.create_task(HeldBodies(self._app)(scope, self._receive, self._send))

    async def put(self, size: int, *, more: bool = True) -> None:
        await self.pieces.put((size, more))
        for _ in range(6):
            await asyncio.sleep(0)

    async def end(self) -> None:
        self.ends.set()
        await self.task

    async def _receive(self) -> Message:
        size, more = await self.pieces.get()
        return {"type": "http.request", "body": b"x" * size, "more_body": more}

    async def _send(self, message: Message) -> None:
        pass

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            while True:
                message = await receive()
                self.num_read += len(message["body"])
                if not message["more_body"]:
                    break
        except HttpError as error:
            self.error = error
        if self.early:
            scope[HELD_BODY].release()
        await self.ends.wait()
        await send_json(send, 200, b"{}")
        await asyncio.sleep(0.01)


def run(test: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, most: int = 4 * MIB) -> None:
    for room in (LARGE, SMALL, MESSAGES):
        monkeypatch.setattr(room, "max_bytes", most)
    asyncio.run(test())


def test_large_bodies_count_whole_from_their_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        first, second, small = Client(declared=3 * MIB), Client(declared=2 * MIB), Client(declared=9)
        await first.put(10)
        await second.put(10)
        assert LARGE.num_bytes == 3 * MIB
        assert (second.num_read, first.error) == (0, None)
        assert second.error is not None
        refusal = second.error.refusal
        assert (refusal.status, refusal.headers) == (503, ((b"retry-after", b"1"),))
        await small.put(9, more=False)  # has a bound of its own
        assert small.error is None
        await first.put(10, more=False)
        for client in (first, second, small):
            await client.end()

    run(test, monkeypatch)


def test_a_body_of_unknown_length_counts_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        client = Client()
        await client.put(MIB)
        assert (SMALL.num_bytes, LARGE.num_bytes) == (MIB, 0)
        await client.put(MIB)
        assert (SMALL.num_bytes, LARGE.num_bytes) == (0, 2 * MIB)
        await client.put(3 * MIB)
        assert client.error is not None
        await client.end()

    run(test, monkeypatch)


def test_a_declared_length_is_no_bound_on_what_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        client = Client(declared=2 * MIB)
        await client.put(5 * MIB)
        assert client.error is not None
        await client.end()

    run(test, monkeypatch)


def test_room_is_given_back_when_the_answer_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        first, early = Client(declared=2 * MIB), Client(declared=2 * MIB)
        early.early = True
        await first.put(2 * MIB, more=False)
        await early.put(2 * MIB, more=False)
        assert LARGE.num_bytes == 2 * MIB  # one needs its body no more
        first.ends.set()
        await asyncio.sleep(0.005)
        assert (LARGE.num_bytes, first.task.done()) == (0, False)
        await first.end()
        await early.end()

    run(test, monkeypatch)


def test_a_client_that_leaves_gives_its_room_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        client = Client(declared=2 * MIB)
        await client.put(MIB)
        client.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await client.task

    run(test, monkeypatch)


def test_forms_go_to_disk_and_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        client = Client(declared=9 * MIB, kind=b"multipart/form-data; boundary=b")
        await client.put(5 * MIB, more=False)
        assert (client.error, LARGE.num_bytes) == (None, 0)
        await client.end()

    run(test, monkeypatch)


def test_requests_of_one_socket_are_bounded_in_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        release = asyncio.Event()

        async def waits(request: Received, writer: asyncio.StreamWriter) -> None:
            await release.wait()
            await says("hey")(request, writer)

        async with gateway(Scripted(waits)) as live:
            async with live.session.ws_connect(live.url.replace("http", "ws", 1) + "/v1/ws") as ws:
                body = {"model": "m", "prompt": "x" * (3 * MIB // 2)}
                for name in "abc":
                    await ws.send_json({"id": name, "path": "/v1/completions", "body": body})
                said = await ws.receive_json(timeout=60)
                assert (said["id"], said["status"]) == ("c", 503)
                assert said["headers"]["retry-after"] == "1"
                release.set()
                statuses = dict.fromkeys("ab", 0)
                while not all(statuses.values()):
                    said = await ws.receive_json(timeout=60)
                    if "status" in said:
                        statuses[said["id"]] = said["status"]
                assert statuses == {"a": 200, "b": 200}
            await live.until(lambda: not live.state.num_open)

    run(test, monkeypatch)


def test_parts_of_messages_are_bounded_in_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with gateway(Scripted(says("hey"))) as live:
            address = live.url.replace("http", "ws", 1) + "/v1/ws"
            async with live.session.ws_connect(address) as good, live.session.ws_connect(address) as bad:
                await bad.send_str("x" * (5 * MIB))
                message = await bad.receive(timeout=60)
                assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, 1013)
                await good.send_json(
                    {"id": "a", "path": "/v1/completions", "body": {"model": "m", "prompt": "hi"}}
                )
                assert (await good.receive_json(timeout=60))["status"] == 200

    run(test, monkeypatch)


def test_doors_for_small_requests_take_no_large_ones() -> None:
    async def test() -> None:
        body = json.dumps({"x": "y" * (2 * MIB)}).encode()

        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        scope: Scope = {"type": "http", "path": "/v1/batches", "headers": []}
        assert await read_bytes(scope, receive, 32 * MIB, "flag") == body
        with pytest.raises(HttpError, match="1048576 are allowed"):
            await read_json(scope, receive, 32 * MIB)

    asyncio.run(test())


def test_a_refused_body_is_not_kept_in_the_helper() -> None:
    body = json.dumps({"stop": ["x"] * 100}).encode()
    gc.disable()  # as in the helper
    try:
        before = sys.getrefcount(body)
        assert b"limit_exceeded" in parse(body, 10)
        assert sys.getrefcount(body) == before
    finally:
        gc.enable()


def test_memory_is_given_back_after_growth_and_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    resident, trims = 100 * MIB, []

    def run_now(work: Callable[[], None]) -> None:
        trims.append(now)
        work()

    monkeypatch.setattr(memory, "trim", lambda: None)
    kept = MemoryReturn(run_now, lambda: resident)
    now = 0.0
    kept.look(now)
    resident += GROWTH_BYTES
    now += EVERY_S
    kept.look(now)
    assert not trims  # not worth it
    resident += MIB
    now += EVERY_S / 2
    kept.look(now)
    assert not trims  # has just looked
    holder = held_bytes.HeldBytes(LARGE)
    holder.grow(2 * MIB)
    now += EVERY_S
    kept.look(now)
    assert not trims  # a body is held
    holder.release()
    now += EVERY_S
    kept.look(now)
    assert trims == [now]
    for _ in range(3):
        now += EVERY_S
        kept.look(now)
    assert len(trims) == 1  # what is left is in use
