"""Calling an ASGI application in this process, without a socket and without a key."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Scope

from quire.http.call import Call, put_call


async def post_local(app: ASGIApp, path: str, body: bytes, call: Call) -> tuple[int, bytes]:
    """POST ``body`` (JSON) as ``call`` and return the answer's status and body. Cancelling ends the request."""
    assert call.is_local, call
    status = 0
    pieces: list[bytes] = []
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if pending:
            return pending.pop()
        await asyncio.Event().wait()  # this client never disconnects
        raise AssertionError("an event that is never set")

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            pieces.append(message.get("body", b""))

    scope: Scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    put_call(scope, call)
    await app(scope, receive, send)
    return status, b"".join(pieces)
