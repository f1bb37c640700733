"""A live gateway and scripted backends in one event loop, over real sockets of 127.0.0.1."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from tests.http.serving import served

from quire_gateway.app import create_gateway
from quire_gateway.build import make_state
from quire_gateway.config_file import gateway_config
from quire_gateway.model_pool import ModelPool
from quire_gateway.stage import Stage
from quire_gateway.state import GatewayState

WAIT_S = 60.0


@dataclass
class Received:
    """A request as a backend got it."""

    method: str
    path: str
    headers: dict[str, str]
    raw: bytes

    @property
    def body(self) -> dict[str, Any]:
        return dict(json.loads(self.raw))


# (request, writer): writes the answer; the connection is closed behind it.
Script = Callable[[Received, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Scripted:
    """A server that does as its script says, with every request to a POST path. It is ready while ``ready``."""

    script: Script
    models: tuple[str, ...] = ("m",)
    ready: bool = True
    is_silent: bool = False  # to polls
    says: str = ""  # the status in the body of its probe
    received: list[Received] = field(default_factory=list)
    num_left: int = 0  # connections that the gateway closed during an answer
    url: str = ""
    card: dict[str, str] = field(default_factory=dict)  # beside the id of each model

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (request := await _read(reader)) is not None:
                if request.method == "GET" and request.path in ("/readyz", "/v1/models"):
                    while self.is_silent:
                        await asyncio.sleep(0.02)
                    named = [{"id": name} | self.card for name in self.models]
                    cards = json.dumps({"data": named, "status": self.says}).encode()
                    await answer(writer, 200 if self.ready else 503, cards)
                    continue
                self.received.append(request)
                await self.script(request, writer)
        except ConnectionError:
            self.num_left += 1
        finally:
            writer.close()


async def _read(reader: asyncio.StreamReader) -> Received | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    first, *lines = head.strip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    method, path, _ = first.split(" ")
    return Received(method, path, headers, await reader.readexactly(int(headers.get("content-length", 0))))


async def answer(
    writer: asyncio.StreamWriter, status: int, body: bytes, headers: Mapping[str, str] | None = None
) -> None:
    """Write a whole answer."""
    named = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    lines = "".join(f"{name}: {value}\r\n" for name, value in named.items())
    writer.write(f"HTTP/1.1 {status} Scripted\r\n{lines}\r\n".encode() + body)
    await writer.drain()


async def begin_stream(
    writer: asyncio.StreamWriter,
    headers: Mapping[str, str] | None = None,
    media_type: str = "text/event-stream",
) -> None:
    lines = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items()).encode()
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n%b" % (media_type.encode(), lines))
    writer.write(b"transfer-encoding: chunked\r\n\r\n")
    await writer.drain()


async def chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Write one chunk; an empty one ends the stream."""
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))
    await writer.drain()


def frame(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def says(text: str) -> Script:
    """Answer with ``text``, whole or streamed by letters, with usage."""

    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        usage = {"prompt_tokens": 5, "completion_tokens": len(text)}
        if not request.body.get("stream"):
            value = {"id": "c-1", "model": request.body["model"], "text": text, "usage": usage}
            await answer(writer, 200, json.dumps(value).encode())
            return
        await begin_stream(writer)
        for letter in text:
            await chunk(writer, frame({"id": "c-1", "text": letter}))
        await chunk(writer, frame({"id": "c-1", "usage": usage}) + b"data: [DONE]\n\n")
        await chunk(writer, b"")

    return script


@asynccontextmanager
async def backends(*scripted: Scripted) -> AsyncGenerator[None, None]:
    """Serve them while the block runs."""
    servers = []
    for each in scripted:
        server = await asyncio.start_server(each.serve, "127.0.0.1", 0)
        each.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        servers.append(server)
    try:
        yield
    finally:
        for server in servers:
            server.close()


@dataclass
class Live:
    """A running gateway and a client."""

    state: GatewayState
    url: str
    session: aiohttp.ClientSession

    async def post(self, body: Any, path: str = "/v1/completions", **headers: str) -> tuple[int, bytes]:
        """Return (status, body); the headers of the answer are in ``self.headers``."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {"content-type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
        async with self.session.post(self.url + path, data=io.BytesIO(data), headers=named) as response:
            self.headers = response.headers
            return response.status, await response.read()

    async def until_post(self, body: Any, status: int, **headers: str) -> None:
        """Post until the answer has ``status``."""
        end_s = time.monotonic() + WAIT_S
        while (found := (await self.post(body, **headers))[0]) != status:
            assert time.monotonic() < end_s, f"the status stays {found}"
            await asyncio.sleep(0.05)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds."""
        end_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end_s, "the condition never came true"
            await asyncio.sleep(0.005)


@asynccontextmanager
async def gateway(*scripted: Scripted, ready: bool = True, **settings: Any) -> AsyncGenerator[Live, None]:
    """Run a gateway in front of the backends, which are named b0, b1 …

    ``settings``: top-level keys and tables, and ``stages``, which are added to those that are on.
    """
    async with backends(*scripted):
        named = [{"name": f"b{i}", "url": each.url} for i, each in enumerate(scripted)]
        quick = {"interval_s": 0.05, "slow_start_s": 0.0} | settings.pop("health", {})
        stages = settings.pop("stages", ())
        config = {"backends": named, "health": quick} | settings
        async with gateway_of(config, ready=ready, stages=stages) as live:
            yield live


@asynccontextmanager
async def gateway_of(
    config: dict[str, Any],
    *,
    ready: bool = True,
    pool: ModelPool | None = None,
    stages: Sequence[Stage] = (),
) -> AsyncGenerator[Live, None]:
    """Run the gateway of a configuration. ``ready``: wait until all backends are; ``stages``: more of them."""
    state = make_state(gateway_config(config), time.monotonic, 0, pool)
    state.stages.on += stages
    async with served(create_gateway(state)) as url, aiohttp.ClientSession() as session:
        live = Live(state, url, session)
        if ready:
            await live.until(lambda: all(b.is_ready for b in state.fleet) and len(list(state.fleet)) > 0)
        yield live
