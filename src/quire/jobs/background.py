"""Background responses: ``/v1/responses`` with ``background: true`` runs on after its client has its id.

The application streams the response to this package, which answers the client with the first event and reads the other
events itself. Queries for the response go to the application, which also stores it at the end.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.http.body import first_data, json_response, send_json
from quire.http.client import BACKGROUND_KEY
from quire.http.edge import TENANT

ROOT = "/v1/responses"


class BackgroundResponses:
    """Around the application of each route of responses; `cancel` and DELETE reach it once a running one has ended."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._running: dict[tuple[str, str], _Run] = {}  # by tenant and id

    def around(self, app: ASGIApp) -> ASGIApp:
        """Return ``app``, the application of a route, with background responses."""

        async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
            answer = self._post if scope["path"] == ROOT else self._other
            await answer(app, scope, receive, send)

        return wrapped

    async def _post(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        messages, body = await _read(receive, self._max_body_bytes)
        if messages[-1]["type"] != "http.request" or not _in_background(body):
            await app(scope, _replayed(messages, receive), send)
            return
        scope[BACKGROUND_KEY] = True
        run = _Run(app, scope, messages)
        if not await run.begun(send):
            return
        response = run.response
        key = (TENANT.get(), response["id"])
        self._running[key] = run
        run.task.add_done_callback(lambda _: self._running.pop(key, None))
        await send_json(send, 200, msgspec.json.encode(response), run.headers)

    async def _other(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        response_id, _, action = scope["path"].removeprefix(ROOT + "/").partition("/")
        run = self._running.get((TENANT.get(), response_id))
        deletes = scope["method"] == "DELETE" and not action
        if run is not None and (deletes or (scope["method"] == "POST" and action == "cancel")):
            await run.cancel()
            if deletes:  # the answer is the same if the application stores nothing
                await app(scope, receive, _dropped)
                deleted = {"id": response_id, "object": "response", "deleted": True}
                await json_response(deleted)(scope, receive, send)
                return
        await app(scope, receive, send)


class _Run:
    """A running response: a request to the application that lasts until its end or `cancel`."""

    def __init__(self, app: ASGIApp, scope: Scope, messages: list[Message]) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.response: dict[str, Any] = {}
        self._cancelled = asyncio.Event()
        self._sent: asyncio.Queue[Message] | None = asyncio.Queue()  # None: further messages are dropped
        self.task = asyncio.create_task(self._run(app, scope, messages))

    async def _run(self, app: ASGIApp, scope: Scope, messages: list[Message]) -> None:
        await app(scope, _replayed(messages, self._disconnect), self._send)

    async def begun(self, send: Send) -> bool:
        """Wait until the response has an id; an error is passed on to ``send`` instead."""
        assert self._sent is not None
        start, body = await self._sent.get(), await self._sent.get()
        if start["status"] == 200:
            self._sent = None
            self.headers = [pair for pair in start["headers"] if pair[0] == b"x-quire-ignored-fields"]
            self.response = first_data(body["body"])["response"]
            return True
        await send(start)
        await send(body)
        return False

    async def cancel(self) -> None:
        """End the response and wait until the application has stored it."""
        self._cancelled.set()
        await asyncio.wait([self.task])

    async def _disconnect(self) -> Message:
        await self._cancelled.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._sent is not None:
            self._sent.put_nowait(message)


async def _read(receive: Receive, max_bytes: int) -> tuple[list[Message], bytes]:
    """Return the messages of a body, and the body; the messages may be incomplete if the body is too long."""
    messages: list[Message] = []
    size = 0
    while size <= max_bytes:
        message = await receive()
        messages.append(message)
        size += len(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body", False):
            break
    return messages, b"".join([message.get("body", b"") for message in messages])


def _replayed(messages: list[Message], receive: Receive) -> Receive:
    waiting = iter(messages)

    async def replay() -> Message:
        message = next(waiting, None)
        return await receive() if message is None else message

    return replay


def _in_background(body: bytes) -> bool:
    """Whether the body asks for a background response. The application refuses a body that is not JSON."""
    if b'"background"' not in body:
        return False
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
    return isinstance(value, dict) and value.get("background") is True


async def _dropped(message: Message) -> None:
    return None
