"""Requests of every dialect whose streams are compared, and what of a stream must not differ."""

from __future__ import annotations

import json
import re
from typing import Any

STORY = "Tell me a story about a little fox."
WEATHER = {
    "name": "weather",
    "description": "The weather of a town.",
    "parameters": {
        "type": "object",
        "properties": {"town": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["town", "days"],
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "legs": {"type": "integer"}, "likes": {"type": "array",
        "items": {"type": "string"}, "minItems": 2, "maxItems": 4}},
    "required": ["name", "legs", "likes"],
    "additionalProperties": False,
}  # fmt: skip


def asks(num_tokens: int) -> list[tuple[str, dict[str, Any]]]:
    """Return (path, body) of streams of up to ``num_tokens`` tokens."""
    said = [{"role": "user", "content": STORY}]
    usage = {"stream_options": {"include_usage": True}}
    tool = {"type": "function", "function": WEATHER}
    chat, text, response, message = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
    json_schema = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}
    found: list[tuple[str, dict[str, Any]]] = [
        (text, {"prompt": "Once upon a time", "seed": 7, "n": 3, "temperature": 1.1, **usage}),
        (text, {"prompt": ["The cat", "The dog sat on"], "temperature": 0.8, "logprobs": 2, "n": 2}),
        (text, {"prompt": "One day, a", "stop": ["zebra crossing", " the little"], "temperature": 1.0, **usage}),
        (text, {"prompt": "A list: ", "regex": "([a-z]+, ){4,30}end", "temperature": 1.2}),
        (chat, {"messages": said, "temperature": 0.9, "n": 2, "presence_penalty": 0.5, **usage}),
        (chat, {"messages": said, "temperature": 0.0, "logprobs": True, "top_logprobs": 2}),
        (chat, {"messages": said, "response_format": json_schema, "temperature": 1.0, "seed": 3}),
        (chat, {"messages": said, "tools": [tool], "tool_choice": "required", "temperature": 1.0, **usage}),
        (response, {"input": STORY, "temperature": 0.7, "include": ["message.output_text.logprobs"]}),
        (response, {"input": STORY, "tools": [{"type": "function", **WEATHER}], "tool_choice": "required"}),
        (message, {"messages": said, "temperature": 1.0, "stop_sequences": ["wolf and"]}),
        (message, {"messages": said, "tools": [{"name": "weather", "input_schema": WEATHER["parameters"]}],
                   "tool_choice": {"type": "any"}, "temperature": 1.0}),
    ]  # fmt: skip
    limit = {response: "max_output_tokens"}
    all_ = [(path, {"model": "quill", "stream": True, limit.get(path, "max_tokens"): num_tokens, **body})
            for path, body in found]  # fmt: skip
    options = {"num_predict": num_tokens, "temperature": 1.0, "seed": 5}
    lines: list[tuple[str, dict[str, Any]]] = [
        ("/api/chat", {"messages": said, "tools": [tool], "logprobs": True}),
        ("/api/generate", {"prompt": STORY, "format": SCHEMA}),
    ]
    return all_ + [(path, {"model": "quill:latest", "options": options, **body}) for path, body in lines]


_IDS = re.compile(rb"\b(cmpl-|chatcmpl-|resp_|msg_|fc_|rs_|call_|toolu_)([0-9a-f]{24,32})")
_CREATED = re.compile(rb'"(created|created_at)":\d+')
_ENDED = re.compile(rb'"completed_at":\d+')
# How much of a prompt was cached depends on the replica's earlier requests.
_CACHED = re.compile(
    rb'"(cached_tokens|cache_read_input_tokens)":\d+|"input_tokens":\d+(?=,"cache_creation_input_tokens")'
)


# What lines of Ollama's API have of one server and time: they have no id by which an answer could be compared.
_OF_LINES = re.compile(
    rb'"(created_at|total_duration|prompt_eval_cached_count|prompt_eval_duration|eval_duration)":("[^"]*"|\d+)'
    rb'|"call_[0-9a-f]{8}"'
)


def by_choice(stream: bytes) -> dict[int, list[bytes]]:
    """Return the frames of each choice in order, whose choices may interleave; -1: frames of no choice."""
    frames: dict[int, list[bytes]] = {}
    if stream.startswith(b"{"):
        return {0: _OF_LINES.sub(b"", stream).splitlines()}
    for frame in stream.split(b"\n\n"):
        data = frame[frame.find(b"data: ") + 6 :]
        value = json.loads(data) if data[:1] == b"{" else {}
        choices = value.get("choices") or [{}]
        frames.setdefault(choices[0].get("index", -1), []).append(_CACHED.sub(b"", _ENDED.sub(b"", frame)))
    return frames


def without_ids(stream: bytes) -> bytes:
    """Return a stream with its ids numbered in the order in which they come, and no times."""
    numbers: dict[bytes, int] = {}
    return _CREATED.sub(
        rb'"\1":0', _IDS.sub(lambda m: b"%b#%d" % (m[1], numbers.setdefault(m[0], len(numbers))), stream)
    )
