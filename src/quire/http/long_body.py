"""Bodies that come in pieces: long ones, and those that the client has coded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from starlette.types import Message, Receive, Scope

from quire.http.body import HELD_BODY, Disconnected, header
from quire.http.codings import find_decoder
from quire.http.refusals import HttpError, Refusal


async def body_pieces(
    scope: Scope, receive: Receive, max_bytes: int, flag: str, first: Message | None = None
) -> AsyncGenerator[bytes, None]:
    """Yield the body in pieces as they arrive. ``flag`` is the server's flag that sets the limit.

    ``first``: the message that was received already.

    A body that the client has coded is yielded as it was before, and ``max_bytes`` holds for both.

    Raises:
        HttpError: 413 beyond ``max_bytes``, 415 for a coding that is not known.
        RequestError: the body is not of its coding.
        Disconnected: the client left before the end.
    """
    coding = header(scope, b"content-encoding")
    decoder = None
    if coding is not None:
        decoder = find_decoder(coding)
    length = header(scope, b"content-length")
    if length is not None and length.isdigit() and int(length) > max_bytes:
        raise _too_large(length.decode(), max_bytes, flag)
    size, decoded_size, more = 0, 0, True
    while more:
        message = await receive() if first is None else first
        first = None
        if message["type"] == "http.disconnect":
            raise Disconnected
        piece = message.get("body", b"")
        size += len(piece)
        if size > max_bytes:
            raise _too_large(f"over {max_bytes}", max_bytes, flag)
        more = message.get("more_body", False)
        if decoder is None:
            yield piece
            continue
        for part in decoder.decode(piece):
            decoded_size += len(part)
            if decoded_size > max_bytes:
                raise _too_large(f"over {max_bytes}", max_bytes, flag)
            if (held_body := scope.get(HELD_BODY)) is not None:
                held_body.take(len(part))
            yield part
            await asyncio.sleep(0)  # other requests have their turn
    if decoder is not None:
        decoder.end()


def _too_large(size: str, max_bytes: int, flag: str) -> HttpError:
    message = f"The body has {size} bytes; at most {max_bytes} are allowed ({flag})."
    return HttpError(Refusal(413, message, code="body_too_large"))
