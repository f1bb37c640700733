"""`Watched`: the server or gateway that the page is about, over HTTP."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from quire.clock import BEAT_S
from quire.http.client_errors import connection_problem
from quire_gateway.frames import MAX_FRAME_BYTES
from quire_lab.diagnose.read import TIMEOUT_S

_SILENT_S = 4 * BEAT_S  # without a message or a beat
_ROUTE = ("x-quire-backend", "x-quire-route")
_decode = msgspec.json.Decoder().decode


class Failed(Exception):
    """The server refused (the text is its own message), or did not answer (``status`` is 0)."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class Watched:
    """One server. Every call takes the key of the browser that it is made for."""

    def __init__(
        self, url: str, admin_url: str | None = None, *, is_own: bool = False, commands: Any = None
    ) -> None:
        """``admin_url``: of the admin surface, ``unix:PATH`` for a socket; a gateway has it below its own address.

        ``is_own``: the server has started this process, so its certificate needs no check. ``commands``: what the
        forms show, see `quire_lab.cockpit.forms`.
        """
        self.url = url.rstrip("/")
        self.admin_url = _base(admin_url)
        self._is_own = is_own
        self.commands = commands  # `forms.Commands`
        self._sessions: dict[str | None, aiohttp.ClientSession] = {}

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()

    async def get(self, path: str, key: str | None, *, at: str | None = None) -> Any:
        """Return the JSON (or text) of a GET. Raises `Failed`."""
        return await self._ask("GET", (at or self.url) + path, key, None)

    async def post(self, path: str, body: Mapping[str, Any], key: str | None) -> Any:
        """Return the JSON of a POST. Raises `Failed`."""
        return await self._ask("POST", self.url + path, key, body)

    async def admin(
        self, method: str, path: str, key: str | None, body: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the admin surface. Raises `Failed`."""
        if self.admin_url is None:
            raise Failed("No admin surface is known: start the page with --admin-url.")
        return await self._ask(method, self.admin_url + path, key, body)

    async def stream(self, path: str, body: Mapping[str, Any], key: str | None) -> AsyncGenerator[Any, None]:
        """Yield the events of a streamed answer, and before them what a gateway says of its choice of a replica.

        Closing the generator aborts the request. Raises `Failed`.
        """
        async with self._opened("POST", self.url + path, key, body) as answer:
            route = {name: answer.headers[name] for name in _ROUTE if name in answer.headers}
            if route:
                yield {"route": route}
            async for data in _events(answer):
                if data != b"[DONE]":
                    yield _decode(data)

    async def ready(self) -> Mapping[str, Any]:
        """Return what ``/readyz`` says, which needs no key. Raises `Failed` where nothing answers."""
        try:
            answer = await self._ask(
                "GET", self.url + "/readyz", None, None, timeout_s=2 * BEAT_S, or_refusal=True
            )
        except msgspec.DecodeError:
            return {}
        return answer if isinstance(answer, Mapping) and "error" not in answer else {}

    async def live(self, key: str | None, *, at: str | None = None) -> AsyncGenerator[str, None]:
        """Yield the messages of ``/engine/live`` as they are, and "" where the engine gives none for a while.

        Raises `Failed`; status 404: there is no such feed.
        """
        silence = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=_SILENT_S)
        url = (at or self.url) + "/engine/live"
        async with self._opened("GET", url, key, None, timeout=silence) as answer:
            async for data in _events(answer, beats=True):
                yield data.decode()

    async def _ask(
        self,
        method: str,
        url: str,
        key: str | None,
        body: Mapping[str, Any] | None,
        *,
        timeout_s: float = TIMEOUT_S,
        or_refusal: bool = False,
    ) -> Any:
        """``or_refusal``: an answer that is an error is returned as well."""
        try:
            async with self._open(method, url, key, body, timeout=aiohttp.ClientTimeout(timeout_s)) as answer:
                if not or_refusal:
                    await _check(answer)
                raw = await answer.read()
        except TimeoutError:
            raise Failed(f"{url} has not answered for {timeout_s:.0f} s.") from None
        except aiohttp.ClientError as error:
            raise Failed(f"{url} {connection_problem(error)}.") from None
        return _decode(raw) if "json" in answer.content_type else raw.decode(errors="replace")

    @asynccontextmanager
    async def _opened(
        self, method: str, url: str, key: str | None, body: Mapping[str, Any] | None, **more: Any
    ) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        try:
            async with self._open(method, url, key, body, **more) as answer:
                await _check(answer)
                yield answer
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Failed(f"{url} {connection_problem(error)}.") from None

    def _open(
        self, method: str, url: str, key: str | None, body: Mapping[str, Any] | None, **more: Any
    ) -> Any:
        socket, target = None, url
        if url.startswith("unix:"):
            socket, _, rest = url.removeprefix("unix:").partition("//")
            target = f"http://admin/{rest}"
        headers = {"x-quire-explain": "1"} | ({"authorization": f"Bearer {key}"} if key else {})
        return self._session(socket).request(method, target, json=body, headers=headers, **more)

    def _session(self, socket: str | None) -> aiohttp.ClientSession:
        if socket not in self._sessions:
            connector = (
                aiohttp.TCPConnector(limit=0, ssl=not self._is_own)
                if socket is None
                else aiohttp.UnixConnector(socket)
            )
            self._sessions[socket] = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),  # one browser's must not go with another one's requests
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0),
                read_bufsize=MAX_FRAME_BYTES,
            )
        return self._sessions[socket]


def _base(url: str | None) -> str | None:
    """Return a URL that paths are added to; the path of a unix socket ends in ``/``, so that ``//`` parts the two."""
    return None if url is None else f"{url}/" if url.startswith("unix:") else url.rstrip("/")


async def _check(answer: aiohttp.ClientResponse) -> None:
    if answer.status < 400:
        return
    raw = await answer.read()
    try:
        body = _decode(raw)
        error = body.get("error", body)
        text = error.get("message", str(error)) if isinstance(error, dict) else str(error)
    except (msgspec.DecodeError, AttributeError):
        text = raw.decode(errors="replace")[:300] or answer.reason or ""
    raise Failed(text, answer.status)


async def _events(answer: aiohttp.ClientResponse, *, beats: bool = False) -> AsyncGenerator[bytes, None]:
    """Yield the data of server-sent events; with ``beats``, nothing for a comment."""
    rest = bytearray()
    async for piece in answer.content.iter_any():
        rest += piece
        while (end := rest.find(b"\n\n")) >= 0:
            frame = bytes(rest[:end])
            del rest[: end + 2]
            if frame.startswith(b"data: "):
                yield frame[6:]
            elif beats and frame.startswith(b":"):
                yield b""
