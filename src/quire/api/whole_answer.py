"""`WholeAnswer`: an answer without choices, written at once from what all prompts gave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from quire.api.refusals import Refusal
from quire.api.replies import Head, Usage
from quire.engine.output import OutputChunk

_NEVER = "this answer is never streamed"


class WholeAnswer:
    """An `Answer` whose JSON is the head, what ``write(chunks, usage)`` makes of a chunk a prompt, and the usage."""

    streamed = False

    def __init__(self, head: Head, write: Callable[[Sequence[OutputChunk], Usage], dict[str, Any]]) -> None:
        self.head = head
        self._write = write

    def whole(self, chunks: Sequence[OutputChunk], prompts: Sequence[Sequence[int]], usage: Usage) -> bytes:
        written = self._write(chunks, usage)
        counts = usage.to_json()
        del counts["completion_tokens"]
        return msgspec.json.encode({**self.head.to_json("list"), **written, "usage": counts})

    def opening(self, prompts: Sequence[Sequence[int]], echoes: Sequence[str], usage: Usage) -> bytes:
        raise AssertionError(_NEVER)

    def frame(self, index: int, chunk: OutputChunk, usage: Usage) -> bytes:
        raise AssertionError(_NEVER)

    def closing(self, usage: Usage) -> bytes:
        raise AssertionError(_NEVER)

    def error(self, refusal: Refusal) -> bytes:
        raise AssertionError(_NEVER)
