"""``/v1/ws``: the API over one WebSocket, with the same events as server-sent ones, many requests at once.

    client   {"id": "a", "path": "/v1/chat/completions", "body": {"messages": […], "stream": true}}
    server   {"id": "a", "status": 200, "headers": {…}}
             {"id": "a", "data": {…}}                      per event; with "event" where the API names them
             {"id": "a", "data": "[DONE]"}
             {"id": "a", "done": true}
    client   {"id": "b", "cancel": true}

Each request is a call of the application in this process with the handshake's headers, so keys, limits and errors are
those of HTTP. Messages are sent one at a time, and an answer is not read on while the client takes nothing.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.errors import QuireError, RequestError
from quire.http.call import MAX_REQUEST_ID_CHARS
from quire.http.refusals import HttpError, Refusal, as_refusal
from quire.metrics.log import Log

PATH = "/v1/ws"
MAX_REQUESTS = 64  # requests of one connection at once
_FRAME_END = re.compile(rb"\r?\n\r?\n")
_HANDSHAKE = (b"upgrade", b"connection", b"origin", b"content-length", b"content-type")
log = Log("http")
_encode = msgspec.json.Encoder().encode


class _Ask(msgspec.Struct):
    """A message of a client."""

    id: str = ""
    path: str = "/v1/chat/completions"
    body: msgspec.Raw = msgspec.Raw(b"{}")
    cancel: bool = False


class WebSockets:
    """ASGI middleware that serves `PATH` by calls of the application, behind a `BrowserGuard`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await self._app(scope, receive, send)
            return
        await receive()  # websocket.connect
        status = await self._refused(scope)
        if status:
            await send({"type": "websocket.http.response.start", "status": status, "headers": []})
            await send({"type": "websocket.http.response.body", "body": b""})
            return
        await send({"type": "websocket.accept"})
        await _Connection(self._app, scope, send).run(receive)

    async def _refused(self, scope: Scope) -> int:
        """Return the status that refuses a handshake, or 0."""
        if scope["path"] != PATH:
            return 404
        statuses: list[int] = []

        async def noted(message: Message) -> None:
            statuses.append(message.get("status", 0))

        async def nothing() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        await self._app(_call(scope, "GET", "/v1/models"), nothing, noted)
        return 401 if statuses[0] == 401 else 0


class _Connection:
    """One client: its running requests."""

    def __init__(self, app: ASGIApp, scope: Scope, send: Send) -> None:
        self._app = app
        self._scope = scope
        self._send = send
        self._sending = asyncio.Lock()
        self._running: dict[str, tuple[asyncio.Task[None], asyncio.Event]] = {}

    async def run(self, receive: Receive) -> None:
        """Serve until the client leaves; what still runs is then cancelled, as when an HTTP client leaves."""
        try:
            while (message := await receive())["type"] != "websocket.disconnect":
                await self._take(message)
        finally:
            for _, left in self._running.values():
                left.set()
            await asyncio.gather(*(task for task, _ in self._running.values()), return_exceptions=True)

    async def _take(self, message: Message) -> None:
        ask = _Ask()
        try:
            ask = _read(message)
            if ask.cancel:
                if ask.id in self._running:
                    self._running[ask.id][1].set()
                return
            if ask.id in self._running:
                raise RequestError(f"id = {ask.id!r} is that of a request that still runs.", param="id")
            if len(self._running) >= MAX_REQUESTS:
                text = f"At most {MAX_REQUESTS} requests may run on a connection."
                raise HttpError(
                    Refusal(429, text, code="too_many_requests", headers=((b"retry-after", b"1"),))
                )
        except QuireError as error:
            refusal = as_refusal(error)
            await self._say(ask.id, status=refusal.status)
            await self._say(ask.id, data=msgspec.Raw(refusal.body(ask.path)))
            await self._say(ask.id, done=True)
            return
        left = asyncio.Event()
        task = asyncio.create_task(self._serve(ask, left))
        self._running[ask.id] = (task, left)
        task.add_done_callback(lambda _: self._running.pop(ask.id, None))

    async def _serve(self, ask: _Ask, left: asyncio.Event) -> None:
        answer = _Answer(lambda **fields: self._say(ask.id, **fields))
        pending: list[Message] = [{"type": "http.request", "body": bytes(ask.body), "more_body": False}]

        async def receive() -> Message:
            if pending:
                return pending.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        try:
            await self._app(_call(self._scope, "POST", ask.path), receive, answer.take)
        except Exception as error:
            # An error of the application: HTTP has a server that logs it and answers 500.
            if left.is_set():
                return  # the client has left: nothing more can be sent
            log.error("websocket_request_crashed", path=ask.path, error=repr(error))
            await self._say(ask.id, data=msgspec.Raw(as_refusal(error).body(ask.path)))
        with suppress(OSError):  # the client has left
            await self._say(ask.id, **({"cancelled": True} if left.is_set() else {}), done=True)

    async def _say(self, ask_id: str, **fields: Any) -> None:
        # Messages of several requests, one at a time; it waits for a slow client.
        async with self._sending:
            await self._send({"type": "websocket.send", "text": _encode({"id": ask_id, **fields}).decode()})


class _Answer:
    """Turns the messages of an ASGI answer into those of the client."""

    def __init__(self, say: Callable[..., Any]) -> None:
        self._say = say
        self._rest = b""
        self._is_stream = False

    async def take(self, message: Message) -> None:
        """The application's `send`."""
        if message["type"] == "http.response.start":
            headers = {name.decode(): value.decode("latin-1") for name, value in message["headers"]}
            self._is_stream = headers.get("content-type", "").startswith("text/event-stream")
            await self._say(status=message["status"], headers=headers)
            return
        self._rest += message.get("body", b"")
        if self._is_stream:
            *frames, self._rest = _FRAME_END.split(self._rest)
            for frame in frames:
                await self._event(frame)
        if not message.get("more_body", False) and self._rest:
            if self._is_stream:
                await self._event(self._rest)
            else:
                await self._say(data=_raw(self._rest))
            self._rest = b""

    async def _event(self, frame: bytes) -> None:
        named, data = {}, []
        for line in frame.splitlines():
            name, _, value = line.partition(b":")
            if name == b"data":
                data.append(value.removeprefix(b" "))
            elif name == b"event":
                named["event"] = value.strip().decode()
        if data:  # else a comment
            await self._say(**named, data=_raw(b"\n".join(data)))


def _raw(data: bytes) -> Any:
    """Return JSON as it is, and anything else as text."""
    is_json = data[:1] in (b"{", b"[") and data != b"[DONE]"
    return msgspec.Raw(data) if is_json else data.decode("utf-8", "replace")


def _read(message: Message) -> _Ask:
    """Read a client's message. Raises `RequestError`."""
    raw = message.get("text") or message.get("bytes") or b""
    try:
        ask = msgspec.json.decode(raw, type=_Ask)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        text = f'The message is not {{"id", "path", "body"}} or {{"id", "cancel"}}: {error}.'
        raise RequestError(text, code="invalid_json") from None
    if len(ask.id) > MAX_REQUEST_ID_CHARS:
        raise RequestError(
            f"id has {len(ask.id)} characters; at most {MAX_REQUEST_ID_CHARS} are allowed.", param="id"
        )
    if not ask.path.startswith("/v1/") or ask.path == PATH:
        raise RequestError(
            f"path = {ask.path[:100]!r} must be a path of the API, such as /v1/responses.", param="path"
        )
    return ask


def _call(scope: Scope, method: str, path: str) -> Scope:
    """Return the scope of a request with the handshake's headers."""
    headers = [
        (name, value)
        for name, value in scope["headers"]
        if name not in _HANDSHAKE and not name.startswith(b"sec-websocket-") and name != b"x-request-id"
    ]
    return {
        "type": "http",
        "asgi": scope["asgi"],
        "http_version": "1.1",
        "method": method,
        "scheme": {"wss": "https"}.get(scope["scheme"], "http"),
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "client": scope.get("client"),
        "server": scope.get("server"),
        "app": scope.get("app"),
        "headers": [*headers, (b"content-type", b"application/json")],
    }
