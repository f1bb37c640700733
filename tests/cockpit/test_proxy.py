"""The page's proxy in the API process, without the page."""

from __future__ import annotations

import asyncio
from typing import Any

from quire.cockpit.process import PageProxy


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
