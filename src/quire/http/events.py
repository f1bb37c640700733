"""Server-sent events."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.http.body import _encode

STREAM_HEADERS = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx must not hold the stream back
)


STREAM_DONE = b"data: [DONE]\n\n"  # the end of OpenAI's streams


def named_event(kind: str, values: dict[str, Any]) -> bytes:
    """Return an event whose name is also the ``type`` of its JSON."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **values}))


def first_data(stream: bytes) -> Any:
    """Return the JSON of the first event in ``stream``."""
    data = next(line for line in stream.split(b"\n") if line.startswith(b"data: "))
    return msgspec.json.decode(data.removeprefix(b"data: "))
