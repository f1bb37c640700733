"""Where an answer has text: in whole answers and in events of streams, of every dialect.

A channel is one text of an answer: (index of the choice, block or item; kind; index of the part). A stream sends it in
pieces; Responses sends it again as a whole when it ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

Channel = tuple[int, str, int]
_REASONING = ("reasoning", "reasoning_content", "thinking", "reasoning_text", "summary_text")
# Fields that tell the tokens of a text: of OpenAI's answers, llama.cpp's and TGI's.
_OF_TOKENS = ("logprobs", "token_ids", "tokens", "completion_probabilities", "top_tokens")
_BLOCK_KEYS = ("text", "thinking", "partial_json")  # of Anthropic's blocks and deltas
_EVENT_KINDS = {
    "reasoning_summary_text": "summary_text",
    "function_call_arguments": "arguments",
    "mcp_call_arguments": "arguments",
    "custom_tool_call_input": "arguments",
}


@dataclass(frozen=True, slots=True)
class Piece:
    """A text, and where it stands."""

    channel: Channel
    holder: Any  # dict that has the text
    key: str
    owner: dict[str, Any]  # has what else tells of the text, such as log-probabilities
    repeats: bool = False  # the whole channel once more

    @property
    def text(self) -> str:
        value = self.holder[self.key]
        return value if isinstance(value, str) else msgspec.json.encode(value).decode()

    def replace(self, text: str) -> None:
        """Put ``text`` there. Raises `msgspec.DecodeError` where JSON is needed and ``text`` is none."""
        is_json = not isinstance(self.holder[self.key], str)
        self.holder[self.key] = msgspec.json.decode(text) if is_json else text
        for name in _OF_TOKENS:
            if self.owner.get(name) is not None:
                self.owner[name] = [] if isinstance(self.owner[name], list) else None
        if isinstance(self.holder.get("id"), int):  # of the token that the text was
            self.holder["id"] = 0

    @property
    def tells_tokens(self) -> bool:
        """Whether something beside the text tells its tokens."""
        return any(self.owner.get(name) for name in _OF_TOKENS) or isinstance(self.holder.get("id"), int)


def kind_of(channel: Channel) -> str:
    """Return what a hook is told: text, reasoning or arguments."""
    kind = channel[1]
    return (
        "reasoning"
        if kind in _REASONING
        else "arguments"
        if kind in ("arguments", "partial_json")
        else "text"
    )


def pieces_of(value: dict[str, Any], *, with_tokens: bool = False) -> list[Piece]:
    """Return the texts of a whole answer, or of an event.

    Empty ones are left out; ``with_tokens``: unless their tokens are told, which have a part of another event's text.
    """
    return [
        piece
        for piece in _pieces(value)
        if piece.holder[piece.key] or (with_tokens and not piece.repeats and piece.tells_tokens)
    ]


def _pieces(value: dict[str, Any]) -> Iterator[Piece]:
    kind = value.get("type")
    if isinstance(value.get("choices"), list):
        for choice in value["choices"]:
            yield from _of_choice(choice)
    elif "done" in value and kind is None:
        yield from _of_line(value)
    elif kind in ("content_block_delta", "content_block_start"):
        yield from _of_block(value.get("delta") or value.get("content_block"), _int(value.get("index")))
    elif kind == "message":
        for index, block in enumerate(value.get("content") or ()):
            yield from _of_block(block, index)
    elif isinstance(kind, str) and kind.startswith("response."):
        yield from _of_event(value, kind.removeprefix("response."))
    elif value.get("object") == "response":
        yield from _of_items(value.get("output"), repeats=False)
    elif "generated_text" in value or isinstance(value.get("token"), dict):
        yield from _of_tgi(value)
    elif isinstance(value.get("content"), str) and "stop" in value:  # llama.cpp's
        yield Piece((0, "content", 0), value, "content", value)
    elif value.get("object") == "list":
        yield from _of_items(value.get("data"), repeats=False)


def _of_choice(choice: dict[str, Any]) -> Iterator[Piece]:
    index = _int(choice.get("index"))
    if isinstance(choice.get("text"), str):
        yield Piece((index, "text", 0), choice, "text", choice)
    for message in (choice.get("delta"), choice.get("message")):
        if not isinstance(message, dict):
            continue
        for key in ("content", "reasoning_content", "reasoning", "refusal"):
            if isinstance(message.get(key), str):
                yield Piece((index, key, 0), message, key, choice)
        calls = [*(message.get("tool_calls") or ()), {"function": message.get("function_call")}]
        for at, call in enumerate(calls):
            function = call.get("function")
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                yield Piece((index, "arguments", _int(call.get("index", at))), function, "arguments", choice)


def _of_line(value: dict[str, Any]) -> Iterator[Piece]:
    """Of Ollama's API, whole or a line of a stream."""
    message = value.get("message", value)
    for key in ("content", "response", "thinking"):
        if isinstance(message.get(key), str):
            yield Piece((0, key, 0), message, key, value)
    for at, call in enumerate(message.get("tool_calls") or ()):
        if isinstance(function := call.get("function"), dict) and function.get("arguments"):
            yield Piece((0, "arguments", _int(function.get("index", at))), function, "arguments", value)


def _of_tgi(value: dict[str, Any]) -> Iterator[Piece]:
    """Of TGI's API: a token of a stream, the whole text at its end, or an answer."""
    channel = (0, "text", 0)
    token = value.get("token")
    if isinstance(token, dict) and isinstance(token.get("text"), str):
        yield Piece(channel, token, "text", value)
    if isinstance(value.get("generated_text"), str):
        details = value.get("details")
        owner = details if isinstance(details, dict) else value
        yield Piece(channel, value, "generated_text", owner, repeats=token is not None)


def _of_block(block: Any, index: int) -> Iterator[Piece]:
    if not isinstance(block, dict):
        return
    for key in _BLOCK_KEYS:
        if isinstance(block.get(key), str):
            yield Piece((index, key, 0), block, key, block)
    if block.get("type") == "tool_use" and block.get("input"):
        yield Piece((index, "partial_json", 0), block, "input", block)


def _of_event(value: dict[str, Any], kind: str) -> Iterator[Piece]:
    name, _, phase = kind.rpartition(".")
    channel = (
        _int(value.get("output_index")),
        _EVENT_KINDS.get(name, name),
        _int(value.get("content_index", value.get("summary_index"))),
    )
    if phase == "delta" and isinstance(value.get("delta"), str):
        yield Piece(channel, value, "delta", value)
    elif phase == "done":
        for key in ("text", "arguments", "refusal", "input"):
            if isinstance(value.get(key), str):
                yield Piece(channel, value, key, value, repeats=True)
    if isinstance(part := value.get("part"), dict):
        yield from _of_part(part, channel[0], channel[2], repeats=True)
    if isinstance(item := value.get("item"), dict):
        yield from _of_item(item, channel[0], repeats=True)
    if isinstance(response := value.get("response"), dict):
        yield from _of_items(response.get("output"), repeats=True)


def _of_items(items: Any, *, repeats: bool) -> Iterator[Piece]:
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, dict):
            yield from _of_item(item, index, repeats=repeats)


def _of_item(item: dict[str, Any], index: int, *, repeats: bool) -> Iterator[Piece]:
    for name in ("content", "summary"):
        parts = item.get(name)
        for at, part in enumerate(parts if isinstance(parts, list) else ()):
            if isinstance(part, dict):
                yield from _of_part(part, index, at, repeats=repeats)
    for key in ("arguments", "input"):
        if isinstance(item.get(key), str):
            yield Piece((index, "arguments", 0), item, key, item, repeats)


def _of_part(part: dict[str, Any], index: int, at: int, *, repeats: bool) -> Iterator[Piece]:
    for key in ("text", "refusal"):
        if isinstance(part.get(key), str):
            yield Piece((index, str(part.get("type", key)), at), part, key, part, repeats)


def _int(value: Any) -> int:
    return value if isinstance(value, int) else 0
