"""Drives an ASGI app message by message, for what a client library hides: partial reads and disconnects."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.types import ASGIApp, Message


class RawCall:
    """One POST in flight. Must be made inside the event loop."""

    def __init__(self, app: ASGIApp, path: str, body: Any) -> None:
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._inbox.put_nowait(
            {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        )
        self.sent: list[Message] = []
        self.first_body = asyncio.Event()
        self.disconnects_at_end = False  # as uvicorn does: the end of the answer is reported as a disconnect
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
            "headers": [(b"content-type", b"application/json")], "client": ("test", 1), "server": ("test", 80),
        }  # fmt: skip
        self.task = asyncio.create_task(app(scope, self._inbox.get, self._send))  # type: ignore[arg-type]

    def disconnect(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})

    async def _send(self, message: Message) -> None:
        self.sent.append(message)
        if message["type"] == "http.response.body":
            self.first_body.set()
            if self.disconnects_at_end and not message.get("more_body", False):
                self.disconnect()
                await asyncio.sleep(0.01)
