"""`read_body` and `PlainBodies`: what is sent to the page, decoded and limited as at the server and the gateway.

The page sends what it has over its WebSocket. Bodies come by the transport that it falls back to.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.errors import RequestError
from quire.http.body import Disconnected, header, send_json
from quire.http.limits import INLINE_BYTES
from quire.http.long_body import body_pieces
from quire.http.refusals import HttpError, as_refusal

CODING = b"content-encoding"


async def read_body(scope: Scope, receive: Receive, send: Send) -> bytes | None:
    """Return the body without its coding; None where it was refused (the answer is sent), or the client has left."""
    try:
        pieces = [piece async for piece in body_pieces(scope, receive, INLINE_BYTES, "fixed for the page")]
    except Disconnected:
        return None
    except (HttpError, RequestError) as error:
        refusal = as_refusal(error)
        await send_json(send, refusal.status, refusal.body(scope["path"]), refusal.headers)
        return None
    return b"".join(pieces)


class PlainBodies:
    """ASGI middleware of the page's own process: a body that the client has coded is decoded, or refused."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or header(scope, CODING) is None:
            await self._app(scope, receive, send)
            return
        body = await read_body(scope, receive, send)
        if body is None:
            return
        length = (b"content-length", str(len(body)).encode())
        headers = [
            pair for pair in scope["headers"] if pair[0] not in (CODING, length[0], b"transfer-encoding")
        ]
        is_read = False

        async def plain() -> Message:
            nonlocal is_read
            if is_read:
                return await receive()
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app({**scope, "headers": [*headers, length]}, plain, send)
