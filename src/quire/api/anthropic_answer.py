"""Answers of ``/v1/messages``: one message of content blocks, whole or as Anthropic's events.

message_start (content_block_start content_block_delta* content_block_stop)* message_delta message_stop
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from quire.api.answer_parts import AnswerParts, Event, Kind, Part
from quire.api.replies import Head, Usage
from quire.api.tools import OutputPlan
from quire.engine.output import OutputChunk
from quire.http.refusals import ANTHROPIC_ROOT, Refusal
from quire.request import FinishReason

_encode = msgspec.json.Encoder().encode
_DELTAS = {
    Kind.TEXT: ("text_delta", "text"),
    Kind.REASONING: ("thinking_delta", "thinking"),
    Kind.CALL: ("input_json_delta", "partial_json"),
}


class MessageAnswer:
    """The one message that answers a request."""

    def __init__(
        self, head: Head, plan: OutputPlan | None, new_id: Callable[[], str], *, streamed: bool
    ) -> None:
        self.head = head
        self.streamed = streamed
        self._parts = AnswerParts(plan, lambda: "toolu_" + new_id()[:24])
        self._end: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    def whole(self, chunks: Sequence[OutputChunk], prompts: Sequence[Sequence[int]], usage: Usage) -> bytes:
        (chunk,) = chunks
        self._parts.feed(chunk.text, last=True)
        self._note_end(chunk)
        message = self._message([_block(part) for part in self._parts.parts], usage)
        return _encode({**message, **usage.beside()})

    def opening(self, prompts: Sequence[Sequence[int]], echoes: Sequence[str], usage: Usage) -> bytes:
        start = Usage(usage.prompt_tokens, 0, usage.cached_tokens)
        return _event("message_start", {"message": self._message([], start)})

    def frame(self, index: int, chunk: OutputChunk, usage: Usage) -> bytes:
        last = chunk.finish_reason is not None
        events = self._parts.feed(chunk.text, last=last)
        if last:
            self._note_end(chunk)
        return b"".join([_block_event(event) for event in events])

    def closing(self, usage: Usage) -> bytes:
        end = _event("message_delta", {"delta": self._end, "usage": usage_json(usage), **usage.beside()})
        return end + _event("message_stop", {})

    def error(self, refusal: Refusal) -> bytes:
        return b"event: error\ndata: " + refusal.body(ANTHROPIC_ROOT) + b"\n\n"

    def _note_end(self, chunk: OutputChunk) -> None:
        if chunk.finish_reason is FinishReason.DEADLINE:
            self._end = {"stop_reason": "deadline", "stop_sequence": None}
            return
        reason = "max_tokens" if chunk.finish_reason is FinishReason.LENGTH else "end_turn"
        if isinstance(chunk.stop_reason, str):
            self._end = {"stop_reason": "stop_sequence", "stop_sequence": chunk.stop_reason}
            return
        if reason == "end_turn" and self._parts.has_calls:
            reason = "tool_use"
        self._end = {"stop_reason": reason, "stop_sequence": None}

    def _message(self, content: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        head = self.head
        return {
            "id": head.id,
            "type": "message",
            "role": "assistant",
            "model": head.model,
            "content": content,
            **self._end,
            "usage": usage_json(usage),
            "system_fingerprint": head.fingerprint,
            "determinism": head.determinism,
        }


def usage_json(usage: Usage) -> dict[str, int]:
    """Anthropic counts the tokens read from the cache apart from the input's."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _block(part: Part, *, begun: bool = False) -> dict[str, Any]:
    """The content block of a part; ``begun``: as it starts in a stream, empty."""
    text = "" if begun else part.text
    if part.kind is Kind.TEXT:
        return {"type": "text", "text": text}
    if part.kind is Kind.REASONING:
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "tool_use", "id": part.id, "name": part.name, "input": arguments_of(text)}


def _block_event(event: Event) -> bytes:
    part = event.part
    if event.verb == "open":
        values: dict[str, Any] = {"index": part.index, "content_block": _block(part, begun=True)}
        return _event("content_block_start", values)
    if event.verb == "close":
        return _event("content_block_stop", {"index": part.index})
    kind, name = _DELTAS[part.kind]
    return _event("content_block_delta", {"index": part.index, "delta": {"type": kind, name: event.text}})


def _event(kind: str, values: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **values}))


def arguments_of(text: str) -> dict[str, Any]:
    """Return a call's arguments as the object that ``input`` has to be; what is none (cut, malformed) as its text."""
    try:
        value = msgspec.json.decode(text.encode() or b"{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"malformed_arguments": text}
