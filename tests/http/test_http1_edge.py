"""Raw HTTP/1: offers of other protocols, HTTP/1.0, Expect, coded bodies, long heads, silent connections."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import uvicorn
from tests.api.asgi_client import app_with_jobs
from tests.api.fake_frontend import FakeFrontend
from tests.gateway.live import Scripted, gateway, says
from tests.http.serving import served

from quire.engine.large_body import LargeBodies
from quire.http import connections, held_bytes
from quire.http.connections import MAX_HEAD_BYTES, ConnectionWatch, Patience
from quire.http.drain import UVICORN

BODY = json.dumps({"model": "m", "prompt": "hi", "max_tokens": 64}).encode()
STREAM = json.dumps({"model": "m", "prompt": "hi", "max_tokens": 64, "stream": True}).encode()
H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"
Port = int


@asynccontextmanager
async def server(max_body_mib: int = 1) -> AsyncGenerator[Port, None]:
    frontend = FakeFrontend()
    frontend.model = type(frontend.model)(
        **{**{f: getattr(frontend.model, f) for f in frontend.model.__slots__}, "names": ("m",)}
    )
    async with served(app_with_jobs(frontend, max_body_bytes=max_body_mib << 20)) as url:
        yield int(url.rpartition(":")[2])


@asynccontextmanager
async def gateway_port(max_body_mib: int = 1) -> AsyncGenerator[Port, None]:
    async with gateway(Scripted(says("hello")), max_body_mib=max_body_mib) as live:
        yield int(live.url.rpartition(":")[2])


SURFACES: dict[str, Callable[[], Any]] = {"server": server, "gateway": gateway_port}
on_both = pytest.mark.parametrize("surface", [*SURFACES])


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


def post(body: bytes, *headers: bytes, version: bytes = b"1.1", length: bool = True) -> bytes:
    lines = [b"POST /v1/completions HTTP/" + version, b"host: x", b"content-type: application/json", *headers]
    if length:
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


async def until_closed(port: Port, *pieces: bytes) -> bytes:
    """Send the pieces, and return all that comes before the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for piece in pieces:
        writer.write(piece)
        await asyncio.sleep(0.02)
    try:
        return await asyncio.wait_for(reader.read(), 20)
    finally:
        writer.close()


async def ask(port: Port, *pieces: bytes) -> tuple[int, bytes, bytes]:
    """Return status, head and body of one answer; the connection ends with it."""
    answer = await until_closed(port, *pieces)
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), head.lower(), body


@on_both
def test_an_offer_of_h2c_is_ignored_and_the_body_read(surface: str) -> None:
    async def main() -> None:
        async with SURFACES[surface]() as port:
            whole = post(BODY, H2C[:-2], b"connection: close")
            for cut in (0, 60, len(whole) - len(BODY) - 3, len(whole) - 5):
                status, _, body = await ask(port, whole[:cut], whole[cut:])
                assert status == 200, body
                assert json.loads(body)["id"]
            chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
            head = post(b"", H2C[:-2], b"connection: close", b"transfer-encoding: chunked", length=False)
            assert (await ask(port, head + chunked))[0] == 200
            # Two requests at once on one connection; the second one has the offer.
            both = await until_closed(port, post(BODY) + post(BODY, H2C[:-2], b"connection: close"))
            assert both.count(b"HTTP/1.1 200 OK") == 2
            get = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + H2C + b"connection: close\r\n\r\n"
            assert (await ask(port, get))[0] == 200
            assert (await ask(port, b"CONNECT x:1 HTTP/1.1\r\nhost: x:1\r\n\r\n"))[0] == 400

    run(main())


@on_both
def test_http_1_0_gets_no_chunks(surface: str) -> None:
    async def main() -> None:
        async with SURFACES[surface]() as port:
            status, head, body = await ask(port, post(STREAM, version=b"1.0"))
            assert status == 200
            assert b"transfer-encoding" not in head
            assert body.startswith(b"data: {")
            assert body.endswith(b"data: [DONE]\n\n")
            _, head, chunked = await ask(port, post(STREAM, b"connection: close"))
            assert b"transfer-encoding: chunked" in head
            assert chunked.endswith(b"0\r\n\r\n")
            status, head, body = await ask(port, post(BODY, b"expect: 100-continue", version=b"1.0"))
            assert status == 200, "no 100 before it"
            assert f"content-length: {len(body)}".encode() in head

    run(main())


def codings() -> list[tuple[bytes, bytes]]:
    raw = zlib.compressobj(wbits=-15)
    found = [
        (b"gzip", gzip.compress(BODY)),
        (b"GZIP", gzip.compress(BODY[:9]) + gzip.compress(BODY[9:])),
        (b"x-gzip", gzip.compress(BODY)),
        (b"deflate", zlib.compress(BODY)),
        (b"deflate", raw.compress(BODY) + raw.flush()),
        (b"identity", BODY),
    ]
    with suppress(ImportError):
        import zstandard

        found += [(b"zstd", zstandard.ZstdCompressor().compress(BODY))]
    return found


@on_both
def test_coded_bodies_are_decoded(surface: str) -> None:
    async def main() -> None:
        async with SURFACES[surface]() as port:
            for coding, body in codings():
                whole = post(body, b"content-encoding: " + coding, b"connection: close")
                for cut in (0, len(whole) - len(body) + 1, len(whole) - 3):
                    status, _, said = await ask(port, whole[:cut], whole[cut:])
                    assert status == 200, (coding, cut, said)

    run(main())


@on_both
def test_codings_are_bounded_known_and_whole(surface: str) -> None:
    bombs = [(b"gzip", gzip.compress(bytes(64 << 20))), (b"deflate", zlib.compress(bytes(64 << 20)))]
    with suppress(ImportError):
        import zstandard

        bombs.append((b"zstd", zstandard.ZstdCompressor().compress(bytes(64 << 20))))

    async def main() -> None:
        async with SURFACES[surface]() as port:

            async def said(coding: bytes, body: bytes) -> tuple[int, str]:
                whole = post(body, b"content-encoding: " + coding, b"connection: close")
                status, _, answer = await ask(port, whole)
                return status, answer.decode()

            for coding, bomb in bombs:
                assert len(bomb) < 1 << 17
                status, text = await said(coding, bomb)
                assert (status, "body_too_large" in text) == (413, True), text
            for coding in (b"br", b"gzip, deflate", b"compress"):
                status, text = await said(coding, BODY)
                assert status == 415
                assert coding.decode() in text
            for coding, body in codings()[:5]:
                for broken in (body[:-4], b"not it at all", b"", b"x"):
                    status, text = await said(coding, broken)
                    assert (status, "invalid_encoding" in text) == (400, True), (coding, broken, text)

    run(main())


@on_both
def test_bombs_are_bounded_in_sum(surface: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty at once: each within the limit of a body, all together far above that of waiting ones."""
    most, size, most_held = 8 << 20, 2 << 20, 0
    monkeypatch.setattr(held_bytes.LARGE, "max_bytes", most)
    monkeypatch.setattr(held_bytes.SMALL, "max_bytes", most)
    grow = held_bytes.HeldBytes.grow

    def watched(self: held_bytes.HeldBytes, num_bytes: int) -> bool:
        nonlocal most_held
        fits = grow(self, num_bytes)
        most_held = max(most_held, held_bytes.LARGE.num_bytes, held_bytes.SMALL.num_bytes)
        return fits

    monkeypatch.setattr(held_bytes.HeldBytes, "grow", watched)
    body = json.dumps({"model": "m", "prompt": "hi", "stop": "x" * size}).encode()
    whole = post(gzip.compress(body), b"content-encoding: gzip", b"connection: close")
    helpers = LargeBodies()
    monkeypatch.setattr("quire.api.app.LargeBodies", lambda: helpers)

    async def main() -> None:
        async with SURFACES[surface](8) as port:
            answers = await asyncio.gather(*(ask(port, whole) for _ in range(40)))
            statuses = Counter(status for status, _, _ in answers)
            assert statuses.keys() <= {400, 503}, "the text is above its limit, or there is no room"
            assert min(statuses[400], statuses[503]) > 0
            assert all(b"retry-after: 1" in head for status, head, _ in answers if status == 503)
            assert (await ask(port, post(BODY, b"connection: close")))[0] == 200
        assert size < most_held <= most
        assert (held_bytes.LARGE.num_bytes, held_bytes.SMALL.num_bytes) == (0, 0)

    try:
        run(main())
    finally:
        helpers.close()


@on_both
def test_expect_is_answered_before_the_body(surface: str) -> None:
    async def main() -> None:
        async with SURFACES[surface]() as port:
            head = post(b"", b"expect: 100-continue", b"content-length: %d" % len(BODY), length=False)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head)
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(BODY)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
            writer.close()
            # Refused unread: the body may never come, so the connection ends.
            big = post(b"", b"expect: 100-continue", b"content-length: 99999999", length=False)
            answer = await until_closed(port, big)
            assert answer.startswith(b"HTTP/1.1 413")

    run(main())


@on_both
def test_heads_beyond_64_kib_are_refused(surface: str) -> None:
    async def main() -> None:
        async with SURFACES[surface]() as port:
            for padding in (
                b"x: " + b"a" * 70_000,
                b"x:" + b" " * 70_000 + b"a",
                b"x: 1\r\n" * 14_000 + b"y: 2",
            ):
                whole = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" + padding + b"\r\n\r\n"
                for pieces in ((whole,), (whole[:40_000], whole[40_000:])):
                    assert (await ask(port, *pieces))[0] == 431, (padding[:9], len(pieces))
            second = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 70_000 + b"\r\n\r\n"
            answer = await until_closed(port, b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n" + second)
            assert b" 431 " in answer
            fits = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx: "
            fits += b"a" * (MAX_HEAD_BYTES - len(fits) - 400) + b"\r\n\r\n"
            assert (await ask(port, fits))[0] == 200

    run(main())


def test_a_connection_that_says_nothing_is_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []

    class Noted:
        def warning(self, event: str, **fields: Any) -> None:
            warned.append(event)

    monkeypatch.setattr(connections, "log", Noted())

    async def main() -> None:
        cut: list[str] = []
        watch = ConnectionWatch(Patience(head_s=1.0), cut.append)
        made: list[Any] = []
        config = uvicorn.Config(app_with_jobs(FakeFrontend()), **UVICORN)
        config.load()
        state = uvicorn.server.ServerState()
        loop = asyncio.get_running_loop()

        def protocol() -> Any:
            made.append(connections.WatchedProtocol(config, state, {}, loop))
            return made[-1]

        listening = await loop.create_server(protocol, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        silent = await asyncio.open_connection("127.0.0.1", port)
        half = await asyncio.open_connection("127.0.0.1", port)
        half[1].write(b"GET /")
        while len(made) < 2 or not made[1].num_received:
            await asyncio.sleep(0.005)
        watch.look(made, 0.0)
        watch.look(made, 5.0)
        assert await silent[0].read() == b""
        assert (await half[0].read()).startswith(b"HTTP/1.1 408")
        assert (warned, cut) == (["half_request"], ["half_request"])
        for _, writer in (silent, half):
            writer.close()
        listening.close()

    run(main())


def test_the_cockpit_has_the_same_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nicegui", reason="the extra `cockpit` is not installed")
    from quire_lab.cockpit import app

    seen: list[Any] = []

    class Never:
        started = True

        def __init__(self, config: uvicorn.Config) -> None:
            seen.append(config.http)

        async def serve(self) -> None: ...

    monkeypatch.setattr(app.uvicorn, "Server", Never)
    monkeypatch.setattr(app, "setproctitle", lambda title: None)
    monkeypatch.setattr(app, "page_application", lambda watched, rules: object())
    assert app.serve_page("http://127.0.0.1:9", None, app.Listen(), b'{"flags": {}, "local": true}') == 0
    assert seen == [connections.WatchedProtocol]
