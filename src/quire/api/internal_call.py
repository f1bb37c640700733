"""Calling an endpoint of this process without a socket: for batch lines and background responses."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from starlette.types import ASGIApp, Message, Scope

from quire.api.edge import name_scope

PRIORITY_KEY = "quire.priority"  # in a scope: stands for the body's priority


class InternalAnswer(NamedTuple):
    """What the endpoint answered."""

    status: int
    body: bytes


async def call_endpoint(
    endpoint: ASGIApp, path: str, body: bytes, *, request_id: str, priority: int | None = None
) -> InternalAnswer:
    """POST ``body`` (JSON) and wait for the whole answer. Cancelling the call ends the request in the engine."""
    status = 0
    parts: list[bytes] = []
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if pending:
            return pending.pop()
        await asyncio.Event().wait()  # this client never goes away by itself
        raise AssertionError("an event that nobody sets")

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    scope: Scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [(b"content-type", b"application/json")],
        PRIORITY_KEY: priority,
    }
    name_scope(scope, request_id)
    await endpoint(scope, receive, send)
    return InternalAnswer(status, b"".join(parts))
