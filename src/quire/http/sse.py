"""Server-sent events: headers and frames."""

from __future__ import annotations

from typing import Any

import msgspec

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx must not hold the stream back
)
DONE = b"data: [DONE]\n\n"  # the end of OpenAI's streams

_encode = msgspec.json.Encoder().encode


def named_event(kind: str, values: dict[str, Any]) -> bytes:
    """Return an event whose name is also the ``type`` of its JSON."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **values}))


def first_data(stream: bytes) -> Any:
    """Return the JSON of the first event in ``stream``."""
    data = next(line for line in stream.split(b"\n") if line.startswith(b"data: "))
    return msgspec.json.decode(data.removeprefix(b"data: "))
