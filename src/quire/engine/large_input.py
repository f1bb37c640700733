"""Large bodies and long texts: parsed and tokenized where the loop that answers requests is not held.

    body   up to 1 MiB with few values   in the loop
           larger                        in a helper process, which answers with a value that is cheap to read:
                                         few values, texts of bounded length, lists of token ids packed
    text   up to `INLINE_CHARS`          in the loop
           up to `THREAD_CHARS`          on a thread, without the interpreter's lock
           longer                        in a helper process, which is killed when the client leaves

Long texts are tokenized one at a time and whole: a text cut in pieces would have other tokens.
"""

from __future__ import annotations

import asyncio
import gc
import json
import tempfile
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from quire.engine.helper_pool import HelperPool
from quire.errors import CapacityError, RequestError
from quire.http.limits import BODY_VALUES, IDS_CODE, TEXT_CHARACTERS, WAITING_BYTES, too_many
from quire.text.tokenizer import Tokenizer

_PIECE = 8192
T = TypeVar("T")
INLINE_CHARS = 8192  # at most about 2 ms of the loop's time
THREAD_CHARS = 262_144
INLINE_ELEMENTS = 256  # messages, or texts; of tokens, a few times as many cost as much


class LargeBodies:
    """Decodes request bodies in a helper process. Belongs to one event loop."""

    def __init__(self) -> None:
        self._pool = HelperPool("body", lambda: {"characters": TEXT_CHARACTERS})
        self._num_bytes = 0  # of bodies that wait

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
            answer = await self._pool.run(pieces, _unchanged)
        finally:
            self._num_bytes -= size
        if answer is None:
            raise too_many("The body", BODY_VALUES + 1, BODY_VALUES, "values or more")
        if answer[:1] != b"=":
            refusal = json.loads(answer)
            raise RequestError(refusal["error"], param=refusal["param"], code=refusal["code"])
        collects = gc.isenabled()
        gc.disable()  # each of many new lists and objects would bring the next collection nearer
        try:
            return msgspec.msgpack.decode(memoryview(answer)[1:], ext_hook=_ids)
        finally:
            if collects:
                gc.enable()

    def close(self) -> None:
        """End the helpers."""
        self._pool.close()


class LongTexts:
    """Tokenizes long texts of one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pool = HelperPool("text", self._head, num_helpers=1)
        self._thread: ThreadPoolExecutor | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    async def encode(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """Return the ids of ``text``. A cancelled call ends the work on a text that waits, or is in the helper.

        Raises:
            RequestError: the text is not Unicode, or tokenizing it takes too much time or memory.
            CapacityError: too many long texts wait (retryable).
        """
        if len(text) <= THREAD_CHARS:
            return (await self.encode_all([text], add_special_tokens=add_special_tokens))[0]
        frame = [b"1" if add_special_tokens else b"0", text.encode(errors="surrogatepass")]
        answer = await self._pool.run(frame, _unchanged)
        if answer is None:
            message = f"Tokenizing a text of {len(text)} characters takes too much time or memory: send a shorter one."
            raise RequestError(message, param="prompt", code="limit_exceeded")
        return array("I", bytes(answer))

    async def encode_all(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Return the ids of each of many texts, together at most `THREAD_CHARS` long."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-text")
        work = self._thread.submit(self._tokenizer.encode_long, texts, add_special_tokens)
        return await asyncio.wrap_future(work)

    def close(self) -> None:
        """End the helper and the thread."""
        self._pool.close()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        if self._folder is not None:
            self._folder.cleanup()
        self._thread = self._folder = None

    def _head(self) -> dict[str, Any]:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="quire-text-")
            self._tokenizer.save(Path(self._folder.name) / "tokenizer.json")
        return {"tokenizer": str(Path(self._folder.name) / "tokenizer.json")}


async def json_in_pieces(items: Sequence[Any], shown: Callable[[Any], Any] | None = None) -> msgspec.Raw:
    """Return the JSON of a long list, made in pieces between which other requests have their turn."""
    pieces: list[bytes] = []
    for start in range(0, len(items), _PIECE):
        piece = items[start : start + _PIECE]
        pieces.append(msgspec.json.encode(list(piece) if shown is None else [*map(shown, piece)])[1:-1])
        await asyncio.sleep(0)
    return msgspec.Raw(b"[" + b",".join(pieces) + b"]")


async def off_loop(size: int, function: Callable[..., T], *args: Any) -> T:
    """Return ``function(*args)``; on a thread if ``size``, the number of elements it walks over, is large."""
    return function(*args) if size <= INLINE_ELEMENTS else await asyncio.to_thread(function, *args)


def _unchanged(answer: bytearray | None, late: bool) -> bytearray | None:
    return answer


def _ids(code: int, data: memoryview) -> array[int]:
    assert code == IDS_CODE
    ids = array("I")
    ids.frombytes(data)
    return ids
