"""Answers that are a list of choices: those of OpenAI's completions and chat completions, whole and as chunks.

A chunk's bytes are put together from parts encoded once per stream; pydantic is not involved, and a plain text delta
costs one string encoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import msgspec

from quire.api.job import Answer, Head, Usage
from quire.api.protocol import StreamOptions
from quire.engine.output import OutputChunk
from quire.http import sse
from quire.http.refusals import Refusal

_encode = msgspec.json.Encoder().encode


class Choices(Protocol):
    """The choices of one endpoint."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def opening(self, index: int, echo: str) -> bytes | None:
        """Return the choice object before any content, or None."""

    def delta(self, index: int, chunk: OutputChunk) -> bytes | None:
        """Return the choice object of one chunk; None if there is nothing to show yet."""

    def whole(self, index: int, chunk: OutputChunk, prompt_token_ids: Sequence[int]) -> dict[str, Any]:
        """Return the choice object of a whole answer, given as one chunk."""

    def beside(self, prompt_token_ids: Sequence[int]) -> dict[str, Any]:
        """Return fields beside ``choices``, in a whole answer and in the first chunk."""

    def scored(self, index: int, chunk: OutputChunk) -> dict[str, Any]:
        """Return fields beside ``choices`` that a chunk brings: the prompt's log-probabilities."""


class ChoicesAnswer(Answer):
    """``options`` None: not streamed."""

    def __init__(self, head: Head, choices: Choices, options: StreamOptions | None, n: int) -> None:
        self.head = head
        self.streamed = options is not None
        self._choices = choices
        self._options = options or StreamOptions()
        self._n = n
        self._envelope = Envelope(head, choices.chunk_kind, usage_field=self._options.include_usage)

    def whole(self, chunks: Sequence[OutputChunk], prompts: Sequence[Sequence[int]], usage: Usage) -> bytes:
        choices = self._choices
        items = [choices.whole(i, chunk, prompts[i // self._n]) for i, chunk in enumerate(chunks)]
        values = {
            **self.head.to_json(choices.kind),
            "choices": items,
            "usage": usage.to_json(),
            **usage.beside(),
        }
        return _encode({**values, **choices.beside(prompts[0]), **choices.scored(0, chunks[0])})

    def opening(self, prompts: Sequence[Sequence[int]], echoes: Sequence[str], usage: Usage) -> bytes:
        beside = self._choices.beside(prompts[0])
        frames = []
        for index in range(len(prompts) * self._n):
            opening = self._choices.opening(index, echoes[index // self._n] if echoes else "")
            if opening is not None:
                frames.append(self._envelope.frame(opening, beside))
        return b"".join(frames)

    def frame(self, index: int, chunk: OutputChunk, usage: Usage) -> bytes:
        choice = self._choices.delta(index, chunk)
        beside = self._choices.scored(index, chunk) if chunk.prompt_logprobs is not None else {}
        if choice is None and not beside:
            return b""
        if self._options.continuous_usage_stats:
            beside["usage"] = usage.to_json()
        return self._envelope.frame(choice or b"", beside)

    def closing(self, usage: Usage) -> bytes:
        beside = usage.beside()
        if self._options.include_usage:
            beside["usage"] = usage.to_json()
        return self._envelope.frame(b"", beside) + sse.DONE if beside else sse.DONE

    def error(self, refusal: Refusal) -> bytes:
        return b"data: " + refusal.body() + b"\n\n" + sse.DONE


class WholeAnswer(Answer):
    """An answer that is never streamed: the head, the fields that ``write(chunks, usage)`` returns, and the usage."""

    def __init__(self, head: Head, write: Callable[[Sequence[OutputChunk], Usage], dict[str, Any]]) -> None:
        self.head = head
        self._write = write

    def whole(self, chunks: Sequence[OutputChunk], prompts: Sequence[Sequence[int]], usage: Usage) -> bytes:
        written = self._write(chunks, usage)
        counts = usage.to_json()
        del counts["completion_tokens"]
        return _encode({**self.head.to_json("list"), **written, "usage": counts})


class Envelope:
    """Frames choices as server-sent events: ``data: {head…, "choices": […], "usage": …}``."""

    __slots__ = ("_end", "_start", "_usage_field")

    def __init__(self, head: Head, kind: str, *, usage_field: bool) -> None:
        self._start = b"data: " + _encode(head.to_json(kind))[:-1] + b',"choices":['
        self._usage_field = usage_field
        # With include_usage OpenAI writes "usage": null on every chunk but the last.
        self._end = b'],"usage":null}\n\n' if usage_field else b"]}\n\n"

    def frame(self, choice: bytes, beside: dict[str, Any]) -> bytes:
        """Frame a choice (or none) with the fields ``beside`` it, such as ``usage``."""
        if not beside:
            return self._start + choice + self._end
        if self._usage_field and "usage" not in beside:
            beside = {**beside, "usage": None}
        return self._start + choice + b"]," + _encode(beside)[1:] + b"\n\n"
