"""/v1/ws: events as over HTTP, many requests at once, cancel, keys, limits, and slow clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import aiohttp
import pytest
from tests.gateway.live import Live, Received, Scripted, begin_stream, chunk, frame, gateway, says

COMPLETIONS = "/v1/completions"
BODY = {"model": "m", "prompt": "hi", "stream": True}


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


def connect(live: Live, **headers: str) -> Any:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return live.session.ws_connect(live.url.replace("http", "ws", 1) + "/v1/ws", headers=named)


async def until_done(ws: aiohttp.ClientWebSocketResponse, *ids: str) -> dict[str, list[dict[str, Any]]]:
    """Return the messages of each request, until all of ``ids`` are done."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ids}
    while not all(said and said[-1].get("done") for said in found.values()):
        message = await ws.receive_json(timeout=60)
        found.setdefault(message.pop("id"), []).append(message)
    return found


def test_events_are_those_of_http() -> None:
    async def main() -> None:
        async with gateway(Scripted(says("hey"))) as live, connect(live) as ws:
            _, stream = await live.post(BODY)
            await ws.send_json({"id": "a", "path": COMPLETIONS, "body": BODY})
            await ws.send_json({"id": "b", "path": COMPLETIONS, "body": BODY | {"stream": False}})
            found = await until_done(ws, "a", "b")
            assert found["a"][0]["status"] == 200
            assert "x-request-id" in found["a"][0]["headers"]
            events = [each[6:] for each in stream.split(b"\n\n") if each]
            expected = [json.loads(each) if each[:1] == b"{" else "[DONE]" for each in events]
            assert [each["data"] for each in found["a"][1:-1]] == expected
            assert found["b"][1]["data"]["text"] == "hey"
            assert live.state.metrics.requests[COMPLETIONS, "200", "ok"] == 3

    run(main())


async def endless(request: Received, writer: asyncio.StreamWriter) -> None:
    await begin_stream(writer)
    while True:
        await chunk(writer, frame({"text": "a" * 2000}))
        await asyncio.sleep(0)


def test_a_message_cancels_a_request_and_no_other() -> None:
    async def main() -> None:
        backend = Scripted(endless)
        async with gateway(backend, Scripted(says("x"), models=("other",))) as live, connect(live) as ws:
            await ws.send_json({"id": "long", "path": COMPLETIONS, "body": BODY})
            while "data" not in await ws.receive_json(timeout=60):
                continue
            await ws.send_json({"id": "long", "cancel": True})
            assert (await until_done(ws, "long"))["long"][-1] == {"cancelled": True, "done": True}
            await live.until(lambda: backend.num_left == 1)
            await ws.send_json({"id": "next", "path": COMPLETIONS, "body": BODY | {"model": "other"}})
            assert (await until_done(ws, "next"))["next"][0]["status"] == 200
            assert live.state.metrics.requests[COMPLETIONS, "499", "left"] == 1

    run(main())


def test_a_client_that_leaves_ends_its_requests() -> None:
    async def main() -> None:
        backend = Scripted(endless)
        async with gateway(backend) as live:
            async with connect(live) as ws:
                for name in "ab":
                    await ws.send_json({"id": name, "path": COMPLETIONS, "body": BODY})
                await live.until(lambda: len(backend.received) == 2)
            await live.until(lambda: live.state.num_open == 0)
            await live.until(lambda: backend.num_left == 2)

    run(main())


def test_a_slow_client_slows_the_backend() -> None:
    sent = 0

    async def counts(request: Received, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await begin_stream(writer)
        for _ in range(20_000):
            await chunk(writer, frame({"text": "a" * 10_000}))
            sent += 1

    async def main() -> None:
        async with gateway(Scripted(counts)) as live:
            reader, writer = await asyncio.open_connection(*live.url[7:].split(":"))
            writer.write(
                b"GET /v1/ws HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
                b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
            )
            assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
            data = json.dumps({"id": "a", "path": COMPLETIONS, "body": BODY}).encode()
            writer.write(bytes((0x81, 0x80 | 126)) + len(data).to_bytes(2, "big") + bytes(4) + data)
            await live.until(lambda: sent > 0)
            before = -1
            while sent != before:  # until nothing moves
                before = sent
                await asyncio.sleep(0.5)
            assert sent < 4000
            writer.close()
            await live.until(lambda: live.state.num_open == 0)

    run(main())


def test_keys_and_limits_are_those_of_http() -> None:
    async def main() -> None:
        settings = {"api_keys": ["k1"], "limits": {"requests_per_minute": 1}}
        async with gateway(Scripted(says("x")), **settings) as live:
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await connect(live)
            assert refused.value.status == 401
            async with connect(live, authorization="Bearer k1") as ws:
                for name in "ab":
                    await ws.send_json({"id": name, "path": COMPLETIONS, "body": BODY})
                    found = (await until_done(ws, name))[name]
                    assert found[0]["status"] == (200 if name == "a" else 429)
                assert found[1]["data"]["error"]["code"] == "rate_limit_exceeded"

    run(main())


@pytest.mark.parametrize(
    ("origin", "good"), [("http://localhost:3000", True), ("https://elsewhere.net", False)]
)
def test_pages_of_other_origins_cannot_connect(origin: str, good: bool) -> None:
    async def main() -> None:
        async with gateway(Scripted(says("x"))) as live:
            if good:
                async with connect(live, origin=origin):
                    return
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await connect(live, origin=origin)
            assert refused.value.status == 403

    run(main())


def test_wrong_messages_are_answered_and_the_connection_lives() -> None:
    async def main() -> None:
        async with gateway(Scripted(endless)) as live, connect(live) as ws:
            for message, status, word in (
                ("no json", 400, "The message is not"),
                ('{"id": 5}', 400, "The message is not"),
                ('{"id": "a", "path": "/admin/backends"}', 400, "path"),
                ('{"id": "a", "path": "/v1/ws"}', 400, "path"),
                ('{"id": "a", "path": "/v1/nowhere", "body": {}}', 404, "/v1/nowhere"),
                ('{"id": "a", "path": "/v1/completions", "body": [1]}', 400, "object"),
            ):
                await ws.send_str(message)
                while "status" not in (said := await ws.receive_json(timeout=60)):
                    continue
                assert said["status"] == status
                assert word in json.dumps((await ws.receive_json(timeout=60))["data"])
                assert (await ws.receive_json(timeout=60))["done"]
            await ws.send_json({"id": "a", "path": COMPLETIONS, "body": BODY})
            await ws.send_json({"id": "a", "path": COMPLETIONS, "body": BODY})
            while (await ws.receive_json(timeout=60)).get("status") != 400:
                continue

    run(main())
