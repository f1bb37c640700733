"""Bodies that are sent to the page: at the proxy in the API process, and in the page's own process."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from quire.http.limits import INLINE_BYTES
from quire_lab.cockpit.bodies import PlainBodies
from quire_lab.cockpit.process import PageProxy

BODY = b"40" * 1000


class UpProcess:
    """A page process that is up; nothing is asked of it."""

    socket = "/nowhere"

    async def is_up(self) -> bool:
        return True


def test_a_large_body_for_the_page_is_refused_unread() -> None:
    sent: list[dict[str, Any]] = []
    received = 0

    async def receive() -> dict[str, Any]:
        nonlocal received
        received += 1
        return {"type": "http.request", "body": bytes(300_000), "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(*_: object) -> None:
        raise AssertionError

    scope = {"type": "http", "method": "POST", "path": "/cockpit/x", "headers": [], "query_string": b""}
    asyncio.run(PageProxy(app, UpProcess())(scope, receive, send))  # type: ignore[arg-type]
    assert sent[0]["status"] == 413
    assert received == 4


class Page:
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.seen: list[tuple[dict[bytes, bytes], bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        self.seen.append((dict(scope["headers"]), message["body"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


def status_of(page: Page, coding: bytes, body: bytes) -> int:
    """Send a body that is coded so to the page's own process."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-encoding", coding), (b"content-length", str(len(body)).encode())]
    scope = {"type": "http", "method": "POST", "path": "/_nicegui_ws/socket.io/", "headers": headers}
    asyncio.run(PlainBodies(page)(scope, receive, send))
    return int(sent[0]["status"])


@pytest.mark.parametrize(("coding", "code"), [(b"gzip", gzip.compress), (b"deflate", zlib.compress)])
def test_a_coded_body_reaches_the_page_decoded(coding: bytes, code: Any) -> None:
    page = Page()
    assert status_of(page, coding, code(BODY)) == 200
    assert page.seen == [({b"content-length": b"2000"}, BODY)]


@pytest.mark.parametrize(
    ("coding", "body", "status"),
    [
        (b"br", b"x", 415),
        (b"gzip", b"no gzip", 400),
        (b"gzip", gzip.compress(bytes(INLINE_BYTES + 1)), 413),
    ],
)
def test_other_codings_and_large_bodies_are_refused(coding: bytes, body: bytes, status: int) -> None:
    page = Page()
    assert status_of(page, coding, body) == status
    assert page.seen == []


def test_the_proxy_hands_a_coded_body_on_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Client:
        async def request(self, method: str, url: str, **options: Any) -> Any:
            asked.append((dict(options["headers"]), options["data"]))
            raise aiohttp.ClientError

    async def app(*_: object) -> None: ...

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": gzip.compress(BODY), "more_body": False}

    proxy = PageProxy(app, UpProcess())  # type: ignore[arg-type]
    monkeypatch.setattr(proxy, "_client", Client)
    headers = [(b"content-encoding", b"gzip"), (b"accept", b"*/*")]
    scope = {"type": "http", "method": "POST", "path": "/cockpit/x", "headers": headers, "query_string": b""}
    asyncio.run(proxy(scope, receive, app))  # type: ignore[arg-type]
    assert asked == [({"accept": "*/*"}, BODY)]


def test_browsers_do_not_share_a_cookie(tmp_path: Path) -> None:
    """The cookie names the browser, and with it its keys: the proxy must not keep one for the next browser."""

    async def page(request: web.Request) -> web.Response:
        return web.Response(
            text=request.headers.get("cookie", "none"), headers={"set-cookie": "session=first; path=/"}
        )

    async def main() -> list[tuple[bytes, bytes]]:
        served = web.Application()
        served.router.add_get("/", page)
        runner = web.AppRunner(served)
        await runner.setup()
        process = UpProcess()
        process.socket = str(tmp_path / "page.sock")
        await web.UnixSite(runner, process.socket).start()
        proxy = PageProxy(served, process)  # type: ignore[arg-type]
        answers = [await ask(proxy) for _ in range(2)]
        await proxy._client().close()
        await runner.cleanup()
        return answers

    async def ask(proxy: PageProxy) -> tuple[bytes, bytes]:
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b""}
        await proxy(scope, receive, send)  # type: ignore[arg-type]
        body = b"".join(message.get("body", b"") for message in sent[1:])
        return body, dict(sent[0]["headers"])[b"set-cookie"]

    assert asyncio.run(main()) == [(b"none", b"session=first; path=/")] * 2
