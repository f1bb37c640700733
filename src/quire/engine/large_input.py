"""Long texts, tokenized where the loop that answers requests is not held.

    up to `INLINE_CHARS`           in the loop
    up to `THREAD_CHARS`   on a thread, without the interpreter's lock
    longer                 in a helper process, which is killed when the client leaves

Long texts are tokenized one at a time and whole: a text cut in pieces would have other tokens.
"""

from __future__ import annotations

import asyncio
import tempfile
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from quire.engine.helper_pool import HelperPool
from quire.errors import RequestError
from quire.text.tokenizer import Tokenizer

THREAD_CHARS = 262_144


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


def _unchanged(answer: bytearray | None, late: bool) -> bytearray | None:
    return answer
