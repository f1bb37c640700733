"""What crosses the process boundary, as msgpack: one frame names the type, one carries the value.

Our own dataclasses and named tuples are encoded as they are; msgspec checks types on the way in.
"""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

import msgspec

from quire.config import EngineConfig
from quire.engine.client import EngineInfo
from quire.engine.inbox import Message, Reply
from quire.metrics.engine_stats import EngineStats
from quire.metrics.log import LogStyle
from quire.request import TokenEvent


class Boot(NamedTuple):
    """Parent → child, first of all: what to load."""

    config: EngineConfig
    log_level: str
    log_format: LogStyle = "human"


class Events(NamedTuple):
    """Child → parent: the events of one step, and the answers to calls that came before it."""

    events: list[TokenEvent]
    replies: list[Reply]


class Failure(NamedTuple):
    """Child → parent, last of all: the engine cannot go on."""

    error: str  # name of the exception type
    text: str  # one line


_encoder = msgspec.msgpack.Encoder()
_decoders: dict[bytes, msgspec.msgpack.Decoder[Any]] = {
    kind.__name__.encode(): msgspec.msgpack.Decoder(kind)
    for kind in (*get_args(Message), Boot, Events, Failure, EngineInfo, EngineStats)
}


def encode(value: Any) -> list[bytes]:
    """Return the two frames of ``value``."""
    return [type(value).__name__.encode(), _encoder.encode(value)]


def decode(frames: list[bytes]) -> Any:
    """Return the value of two frames; both ends are the same program, so anything else is a bug."""
    kind, payload = frames
    return _decoders[kind].decode(payload)
