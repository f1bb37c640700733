"""Large request bodies: parsed and checked in a helper process, which answers with a value that is cheap to read.

    LargeBodies   in the process that answers requests
    parse         in the helper: a body ──> "=" and its value in msgpack, or a refusal in JSON

The value has few elements and texts of bounded length; its lists of token ids are packed.
"""

from __future__ import annotations

import asyncio
import gc
import json
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from quire.engine.helper_pool import HelperPool
from quire.errors import CapacityError, RequestError
from quire.http.body import decode
from quire.http.limits import (
    BODY_VALUES,
    LIST_IDS,
    TEXT_CHARACTERS,
    WAITING_BYTES,
    check_fields,
    check_whole,
    too_many,
)  # fmt: skip

IDS_CODE = 1  # msgpack's extension type of a list of token ids, uint32 each
_MIN_PACKED = 64  # shorter lists of ids stay lists
_ID_LIMIT = 2**32
_PIECE = 8192


class LargeBodies:
    """Decodes request bodies in a helper process. Belongs to one event loop."""

    def __init__(self) -> None:
        self._pool = HelperPool("body", lambda: {"characters": TEXT_CHARACTERS})
        self._num_bytes = 0  # bodies that wait

    async def decode(self, pieces: Sequence[bytes]) -> Any:
        """Return the value of a body, in which long lists of token ids are arrays.

        Raises:
            RequestError: it is not JSON, or something in it is above its limit.
            CapacityError: too many large bodies wait (retryable).
        """
        size = sum(map(len, pieces))
        if self._num_bytes + size > WAITING_BYTES:
            raise CapacityError("Too many large bodies wait to be parsed: try again later.", retryable=True)
        self._num_bytes += size
        try:
            answer = await self._pool.run(pieces, lambda answer, late: answer)
        finally:
            self._num_bytes -= size
        if answer is None:
            raise too_many("The body", BODY_VALUES + 1, BODY_VALUES, "values or more")
        if answer[:1] != b"=":
            refusal = json.loads(answer)
            raise RequestError(refusal["error"], param=refusal["param"], code=refusal["code"])
        collects = gc.isenabled()
        # Each of many new lists and objects would bring the next collection nearer.
        gc.disable()
        try:
            return msgspec.msgpack.decode(memoryview(answer)[1:], ext_hook=_ids)
        finally:
            if collects:
                gc.enable()

    def close(self) -> None:
        """End the helpers."""
        self._pool.close()


def parse(body: bytes, max_characters: int) -> bytes:
    """Return the frame that answers with the value of a body, or with its refusal."""
    try:
        value = decode(body)
        check_fields(value)
        for name in {"prompt", "input"} & value.keys() if isinstance(value, dict) else ():
            value[name] = packed(name, value[name])
        check_whole(value, max_characters)
        return b"=" + msgspec.msgpack.encode(value)
    except RequestError as error:
        # It is not kept: by its traceback it keeps the body, in a circle that is not collected in the helper.
        return _refusal(error)
    except MemoryError:
        return _refusal(too_many("The body", BODY_VALUES + 1, BODY_VALUES, "values or more"))


def _refusal(refusal: RequestError) -> bytes:
    return json.dumps({"error": str(refusal), "param": refusal.param, "code": refusal.code}).encode()


def packed(name: str, value: Any) -> Any:
    """Return ``value`` with each list of token ids (the value, or an element of it) as packed integers."""
    if not isinstance(value, list):
        return value
    if value and isinstance(value[0], list):
        return [packed(name, item) if isinstance(item, list) else item for item in value]
    if (
        len(value) < _MIN_PACKED
        or not set(map(type, value)) <= {int}
        or min(value) < 0
        or max(value) >= _ID_LIMIT
    ):
        return value
    if len(value) > LIST_IDS:
        raise too_many(name, len(value), LIST_IDS, "token ids")
    return msgspec.msgpack.Ext(IDS_CODE, array("I", value).tobytes())


def _ids(code: int, data: memoryview) -> array[int]:
    assert code == IDS_CODE
    ids = array("I")
    ids.frombytes(data)
    return ids


async def json_in_pieces(items: Sequence[Any], shown: Callable[[Any], Any] | None = None) -> msgspec.Raw:
    """Return the JSON of a long list, made in pieces between which other requests have their turn."""
    pieces: list[bytes] = []
    for start in range(0, len(items), _PIECE):
        piece = items[start : start + _PIECE]
        pieces.append(msgspec.json.encode(list(piece) if shown is None else [*map(shown, piece)])[1:-1])
        await asyncio.sleep(0)
    return msgspec.Raw(b"[" + b",".join(pieces) + b"]")
