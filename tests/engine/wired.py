"""An engine in this process whose messages pass through the wire of `ProcessClient` in both directions."""

from __future__ import annotations

from typing import Any

from quire.engine.in_process import InProcessClient
from quire.engine.messages import Message, Reply
from quire.engine.process import Events, decode, encode
from quire.request import Request, TokenEvent


class WiredClient(InProcessClient):
    """An `InProcessClient` that encodes and decodes as the process does. ``lost``: requests that never left."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lost: list[Request] = []

    def send(self, message: Message) -> None:
        try:
            frames = encode(message)
        except Exception:
            if isinstance(message, Request):
                self.lost.append(message)
            raise
        super().send(decode(frames))

    def receive(self, timeout_s: float | None = None) -> list[TokenEvent]:
        events: list[TokenEvent] = decode(encode(Events(super().receive(timeout_s), []))).events
        return events

    def replies(self) -> list[Reply]:
        replies: list[Reply] = decode(encode(Events([], super().replies()))).replies
        return replies
