"""Calling an ASGI application in this process, without a socket and without a key."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Scope

from quire.http.edge import name_scope

PRIORITY_KEY = "quire.priority"  # in a scope: replaces the body's priority
BACKGROUND_KEY = "quire.background"  # in a scope: a response may run in the background
ANSWER_KEY = "quire.answer"  # in a scope: the answer's id, time and seed, as `quire.api.relayed` has them


async def post_local(
    app: ASGIApp,
    path: str,
    body: bytes,
    *,
    request_id: str,
    priority: int | None = None,
    answer: str | None = None,
) -> tuple[int, bytes]:
    """POST ``body`` (JSON) and return the answer's status and body. Cancelling the call ends the request."""
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
        PRIORITY_KEY: priority,
    }
    if answer is not None:
        scope[ANSWER_KEY] = answer
    name_scope(scope, request_id)
    await app(scope, receive, send)
    return status, b"".join(pieces)
