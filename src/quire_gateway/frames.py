"""`Frames`: a stream of server-sent events, or of lines of JSON (Ollama's), in whole frames, and the frame that ends a
broken one.

Only whole frames go to the client: a stream that breaks can then be continued, or ended with an error event.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from quire.http.events import named_event
from quire.http.refusals import ANTHROPIC_ROOT, OLLAMA_ROOT, Refusal

MAX_FRAME_BYTES = 8 << 20
LINES = "application/x-ndjson"
_EVENTS = "text/event-stream"
_ENDS = (b"\n\n", b"\r\n\r\n")


def is_stream(content_type: str) -> bool:
    """Whether an answer of this type comes in frames."""
    return content_type.startswith((_EVENTS, LINES))


class StreamMoves(Exception):
    """A replica ended the stream because it shuts down, or because its engine is dead."""


class Cutter(Protocol):
    """Cuts a stream: `Frames`, and `Groups` for one that another replica may continue."""

    def feed(self, data: bytes) -> bytes: ...

    def end(self) -> bytes: ...


class Frames:
    """Cuts bytes at the ends of frames (an empty line). A frame beyond `MAX_FRAME_BYTES` raises `ValueError`."""

    def __init__(self, content_type: str = _EVENTS) -> None:
        self._ends = (b"\n",) if content_type.startswith(LINES) else _ENDS
        self._rest = bytearray()  # of a frame whose end has not come

    def feed(self, data: bytes) -> bytes:
        """Return the whole frames among the bytes so far that have not been returned."""
        rest = self._rest
        if not rest and data.endswith(self._ends[0]):
            return data
        start = max(len(rest) - 3, 0)  # an empty line may begin in the bytes before
        rest += data
        end = max((at + len(line) for line in self._ends if (at := rest.rfind(line, start)) >= 0), default=0)
        if len(rest) - end > MAX_FRAME_BYTES:
            raise ValueError(f"a frame has more than {MAX_FRAME_BYTES} bytes")
        complete = bytes(rest[:end])
        del rest[:end]
        return complete

    def end(self) -> bytes:
        """Return what is left at the end of the stream."""
        return bytes(self._rest)


def has_event(frames: bytes) -> bool:
    """Whether frames hold an event or a line, not only comments, which backends send to keep a connection open."""
    return frames.startswith((b"data", b"event", b"error:", b"{")) or b"data:" in frames or b"\n{" in frames


def without_usage(frames: bytes) -> bytes:
    """Return whole frames without the one that only holds usage, for a client that did not ask for it."""
    if b'"choices":[]' not in frames and b'"choices": []' not in frames:
        return frames
    frames_left = [frame for frame in frames.split(b"\n\n") if not _only_usage(frame)]
    return b"\n\n".join(frames_left)


def _only_usage(frame: bytes) -> bool:
    try:
        value = msgspec.json.decode(frame.removeprefix(b"data:"))
    except msgspec.DecodeError:
        return False
    return isinstance(value, dict) and value.get("choices") == [] and isinstance(value.get("usage"), dict)


def error_frame(path: str, refusal: Refusal) -> bytes:
    """Return the event that ends a stream of ``path`` that broke, as the client's library expects it."""
    if path.startswith(OLLAMA_ROOT):
        return refusal.body(path) + b"\n"
    if path == "/generate_stream":
        value = {"error": refusal.message, "error_type": refusal.code or "generation"}
        return b"data: %b\n\n" % msgspec.json.encode(value)
    if path == ANTHROPIC_ROOT:
        return b"event: error\ndata: %b\n\n" % refusal.body(path)
    if path == "/v1/responses":
        error = refusal.error()
        return named_event("error", {"code": error["code"], "message": error["message"], "param": None})
    return b"data: %b\n\n" % msgspec.json.encode({"error": refusal.error()})
