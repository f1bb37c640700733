"""What clients have sent and this process holds: bounded in sum, whatever each request's own limit is.

    HeldBodies   ASGI middleware: a body counts from its first byte until its answer begins, or the endpoint releases
                 it (`HELD_BODY` in its scope). Large and small ones (up to `INLINE_BYTES`) have a bound each, so that
                 the large ones cannot keep the small ones out. A large one counts whole from its head on
    MESSAGES     the parts of WebSocket messages that have not ended (`quire.http.connections`)

Beyond a bound the answer is 503 with `Retry-After`, before more is read. Forms are written to disk and do not count.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.http.body import HELD_BODY
from quire.http.limits import INLINE_BYTES, WAITING_BYTES
from quire.http.refusals import HttpError, busy


class Room:
    """A bound on bytes that are held together."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.taken = 0  # bytes so far


class HeldBytes:
    """The bytes of one holder."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._num_bytes = 0

    def grow(self, num_bytes: int) -> bool:
        """Hold ``num_bytes`` in all; return False, and hold what was held, where there is no room for more."""
        more = num_bytes - self._num_bytes
        if more <= 0:
            return True
        if self._room.num_bytes + more > self._room.max_bytes:
            return False
        self._room.num_bytes += more
        self._room.taken += more
        self._num_bytes = num_bytes
        return True

    def release(self) -> None:
        self._room.num_bytes -= self._num_bytes
        self._num_bytes = 0


LARGE, SMALL, MESSAGES = (Room(WAITING_BYTES) for _ in range(3))


def is_at_rest() -> bool:
    """Whether next to nothing is held."""
    return LARGE.num_bytes + SMALL.num_bytes + MESSAGES.num_bytes < INLINE_BYTES


class _Body:
    """The body of one request."""

    def __init__(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        declared = int(length) if length.isdigit() and len(length) < 19 else 0
        self._is_counted = not headers.get(b"content-type", b"").lower().startswith(b"multipart/")
        self._declared = declared if declared > INLINE_BYTES else 0
        self._received = 0
        self._bytes = HeldBytes(LARGE if self._declared else SMALL)

    def take(self, num_bytes: int) -> None:
        """So many bytes more have come. Raises `HttpError`."""
        if not self._is_counted:
            return
        self._received += num_bytes
        if self._received > INLINE_BYTES and not self._declared:
            self._declared = self._received
            self._bytes.release()
            self._bytes = HeldBytes(LARGE)
        if not self._bytes.grow(max(self._declared, self._received)):
            self._is_counted = False
            text = "The bodies of other requests leave no room for this one's: try again later."
            raise HttpError(busy(text, "bodies_full", 1))

    def release(self) -> None:
        self._is_counted = False
        self._bytes.release()


class HeldBodies:
    """ASGI middleware that bounds the sum of the bodies that wait for their answers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or HELD_BODY in scope or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        body = scope[HELD_BODY] = _Body(scope)

        async def counted() -> Message:
            body.take(0)
            message = await receive()
            body.take(len(message.get("body", b"")))
            return message

        async def answering(message: Message) -> None:
            body.release()
            await send(message)

        try:
            await self._app(scope, counted, answering)
        finally:
            body.release()
