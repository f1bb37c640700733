"""The messages of ``GET /gateway/cache``, which `quire.api.cache_feed` writes and `quire_gateway.reports` reads."""

from __future__ import annotations

from collections.abc import AsyncIterator
from struct import Struct

from quire.clock import BEAT_S

CACHE_PATH = "/gateway/cache"
PIECES_HEADER = (
    # Of a request: bytes of a piece of text. The answer then has `BLOCKS_HEADER`.
    "x-quire-pieces"
)
# Of an answer: in base64, for each whole piece of the request's text the short hash of the last whole block inside it.
BLOCKS_HEADER = "x-quire-blocks"
BEAT, EVENTS, SNAPSHOT = range(3)
SILENCE_S = 5 * BEAT_S  # without a message, until the reader gives the stream up
_HEAD = Struct("<IBQ")
_MAX_BYTES = 1 << 28


def message(kind: int, number: int, payload: bytes) -> bytes:
    return _HEAD.pack(len(payload), kind, number) + payload


async def messages(pieces: AsyncIterator[bytes]) -> AsyncIterator[tuple[int, bytes]]:
    """Yield (kind, payload) of the messages in a stream of bytes.

    Raises:
        ValueError: a message is missing, or the bytes are no messages.
    """
    rest, expected = bytearray(), 1
    async for piece in pieces:
        rest += piece
        while len(rest) >= _HEAD.size:
            length, kind, number = _HEAD.unpack_from(rest)
            if number != expected or kind > SNAPSHOT or length > _MAX_BYTES:
                raise ValueError(f"message {number} of kind {kind} came where {expected} was expected")
            if len(rest) < _HEAD.size + length:
                break
            yield kind, bytes(rest[_HEAD.size : _HEAD.size + length])
            del rest[: _HEAD.size + length]
            expected += 1
