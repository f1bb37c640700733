"""Errors inside a stream: an answer that began well and ends with an error event, in any of the dialects.

data: {"error": {"message", "type", "code"}}                 OpenAI's, and with {"type": "error"} Anthropic's
data: {"type": "response.failed", "response": {"error": …}}  Responses, or {"type": "error", "code", "message"}
{"error": "message"}                                         Ollama's, and with "error_type" TGI's
error: {"code", "message", "type"}                           llama.cpp's
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.errors import clip

# Types and codes that tell of the request.
_CLIENTS = frozenset((
    "invalid_request_error", "invalid_value", "context_length_exceeded", "not_found_error", "permission_error",
    "authentication_error", "slow_reader", "validation", "exceed_context_size_error", "not_supported_error",
))  # fmt: skip
# Types and codes that tell of too little room or time.
_LOAD = frozenset((
    "rate_limit_error", "overloaded_error", "service_unavailable_error", "queue_full", "deadline_hopeless",
    "deadline_exceeded", "overloaded", "unavailable_error",
))  # fmt: skip


_FIELD = b"error:"  # of an event, in place of ``data:``


@dataclass(frozen=True, slots=True)
class StreamError:
    """What an error event says."""

    message: str
    names: frozenset[str]  # its type and code

    @property
    def is_clients(self) -> bool:
        """Whether the request is wrong: no other backend would do better."""
        return bool(self.names & _CLIENTS)

    @property
    def tells_of_load(self) -> bool:
        return bool(self.names & _LOAD)


def may_have_error(frames: bytes) -> bool:
    """Whether it is worth looking for an error."""
    return b'"error"' in frames or frames.startswith(_FIELD) or b"\n" + _FIELD in frames


def error_in(frames: bytes) -> StreamError | None:
    """Return the first error among the events or lines of a stream."""
    for value in _values(frames):
        response, error = value.get("response"), value.get("error")
        if isinstance(response, dict):
            error = error or response.get("error")
        if value.get("type") == "error" and not error:
            error = value
        if isinstance(error, dict):
            names = frozenset(str(error[name]) for name in ("type", "code") if error.get(name) is not None)
            return StreamError(clip(error.get("message")), names)
        if isinstance(error, str) and error:
            return StreamError(clip(error), frozenset((str(value.get("error_type", "")),)))
    return None


def _values(frames: bytes) -> Iterator[dict[str, Any]]:
    for line in frames.splitlines():
        is_error = line.startswith(_FIELD)
        if not is_error and b'"error"' not in line:
            continue
        try:
            value = msgspec.json.decode(line.removeprefix(_FIELD if is_error else b"data:"))
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            continue
        if isinstance(value, dict):
            yield {"error": value} if is_error else value
