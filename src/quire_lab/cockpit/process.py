"""`PageProcess` and `PageProxy`: the page of ``quire serve --cockpit``, in a process of its own behind the server.

    browser ─ server ─ /, /cockpit…, /_nicegui… ─ unix socket ─ python -m quire_lab.cockpit ─ server's address ─ server

The process ends with the server: it holds one end of a socket pair. Where it is dead, or still starting, the server
answers as without it (the small page at ``/``), and says in its log that it has ended.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.clock import LOOK_S
from quire.executor.child_process import child_environment
from quire.http.drain import MAX_MESSAGE_BYTES
from quire.metrics.log import Log
from quire_lab.cockpit.bodies import read_body

ROOTS = ("/cockpit", "/_nicegui", "/_nicegui_ws", "/favicon.ico")
_OF_A_HOP = {
    "connection",
    "keep-alive",
    "transfer-encoding",
    "content-length",
    "upgrade",
    "te",
    "trailer",
    "host",
}
_DECODED = {"content-encoding"}  # request headers; `read_body` has decoded the body
_HANDSHAKE = {
    "sec-websocket-key",
    "sec-websocket-version",
    "sec-websocket-extensions",
    "sec-websocket-protocol",
}
_START_S = 30.0
log = Log("server")


class PageProcess:
    """The page's process. Its socket is in a directory that only this user can enter."""

    def __init__(self, url: str, admin: str | None, commands: bytes) -> None:
        """``url``: of the server that the page watches; ``admin``: of its admin surface, or ``unix:PATH``.

        ``commands``: the flags of the forms, see `quire_lab.cockpit.forms`.
        """
        self._directory = Path(tempfile.mkdtemp(prefix="quire-page-", dir="/tmp"))
        self.socket = str(self._directory / "page.sock")
        self._closing = False
        self._life, theirs = socket.socketpair()
        with theirs:
            path = self._directory / "commands.json"
            path.write_bytes(commands)
            arguments = [url, "--commands", str(path), "--uds", self.socket, "--life", str(theirs.fileno())]
            if admin is not None:
                arguments += ["--admin-url", admin]
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "quire_lab.cockpit", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                env=child_environment() | {"NICEGUI_STORAGE_PATH": str(self._directory)},
                start_new_session=True,
            )
        threading.Thread(target=self._watch, daemon=True).start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    async def is_up(self) -> bool:
        """Whether the page answers; while it starts, wait for it up to `_START_S`."""
        for _ in range(int(_START_S / LOOK_S)):
            if self._popen.poll() is not None:
                return False
            if Path(self.socket).exists():
                return True
            await asyncio.sleep(LOOK_S)
        return False

    def _watch(self) -> None:
        status = self._popen.wait()
        if not self._closing:
            log.warning("cockpit_ended", status=status, page="the small page is at / again")

    def close(self) -> None:
        """End the process."""
        self._closing = True
        self._life.close()
        try:
            self._popen.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        shutil.rmtree(self._directory, ignore_errors=True)


class PageProxy:
    """ASGI middleware behind the guard of browsers: hands the page's paths, WebSockets too, to its process."""

    def __init__(self, app: ASGIApp, process: PageProcess) -> None:
        self._app = app
        self._process = process
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        is_ours = path == "/" or any(path == root or path.startswith(root + "/") for root in ROOTS)
        if scope["type"] == "lifespan":
            try:
                await self._app(scope, receive, send)
            finally:
                if self._session is not None:
                    await self._session.close()
        elif not is_ours or not await self._process.is_up():
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._socket(scope, receive, send)
        else:
            await self._request(scope, receive, send)

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(self._process.socket, limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),  # each browser has its own, which names it
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0),
                auto_decompress=False,
            )
        return self._session

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(scope, receive, send)
        if body is None:
            return
        try:
            answer = await self._client().request(
                scope["method"],
                _target(scope),
                headers=_headers(scope),
                data=body or None,
                allow_redirects=False,
                skip_auto_headers=("Accept-Encoding",),  # the client's own, or none
            )
        except aiohttp.ClientError:  # it ended just now
            await self._app(scope, receive, send)
            return
        async with answer:
            headers = [
                (name.lower(), value)
                for name, value in answer.raw_headers
                if name.decode().lower() not in _OF_A_HOP
            ]
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            async for piece in answer.content.iter_any():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    async def _socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # websocket.connect
        try:
            theirs = await self._client().ws_connect(
                _target(scope), headers=_headers(scope), max_msg_size=MAX_MESSAGE_BYTES
            )
        except aiohttp.ClientError:
            await send({"type": "websocket.close", "code": 1013})
            return
        await send({"type": "websocket.accept"})
        async with theirs:
            ways = [asyncio.create_task(_up(receive, theirs)), asyncio.create_task(_down(theirs, send))]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
                with suppress(RuntimeError):  # the browser has closed it
                    await send({"type": "websocket.close", "code": 1001})


async def _up(receive: Receive, theirs: aiohttp.ClientWebSocketResponse) -> None:
    while (message := await receive())["type"] == "websocket.receive":
        if message.get("text") is not None:
            await theirs.send_str(message["text"])
        else:
            await theirs.send_bytes(message.get("bytes") or b"")


async def _down(theirs: aiohttp.ClientWebSocketResponse, send: Send) -> None:
    async for message in theirs:
        event: Message = {"type": "websocket.send"}
        event["text" if message.type is aiohttp.WSMsgType.TEXT else "bytes"] = message.data
        await send(event)


def _target(scope: Scope) -> str:
    query = scope.get("query_string", b"").decode("latin-1")
    path = scope.get("raw_path", scope["path"].encode()).decode("latin-1")
    return f"http://page{path.partition('?')[0]}{'?' + query if query else ''}"


def _headers(scope: Scope) -> Any:
    return [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in scope["headers"]
        if name.decode("latin-1") not in _OF_A_HOP | _HANDSHAKE | _DECODED
    ]
