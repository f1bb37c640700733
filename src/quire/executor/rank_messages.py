"""What the executor and its ranks tell each other, and `Channel`: frames over a stream socket. Torch-free.

    executor → rank     RankBoot, then a RankStep per plan
    rank → executor     RankLoaded or RankFailure; then RankCounts per plan, and from the answering rank an Answer;
                        a LayerLoad whenever the experts of a layer were looked at

A frame is the kind and the length of its payload, then the payload as msgpack. A socket sees the death of the other
side as end of file.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from quire.config import EngineConfig
from quire.executor.base import RankLoaded
from quire.metrics.engine_stats import LayerLoad
from quire.metrics.log import LogStyle
from quire.parallel.placement import Meeting
from quire.step import SeqTold, StepPlan, StepResult

_HEAD = struct.Struct("<BQ")


@dataclass(frozen=True, slots=True)
class RankBoot:
    """The first message: which part of the model to load."""

    config: EngineConfig
    rank: int
    cores: tuple[int, ...]  # cores that the rank is pinned to; empty: not pinned
    log_level: str
    log_format: LogStyle
    memory: str = ""  # name of the collectives' shared memory; empty: none
    meeting: Meeting | None = None  # for exchange with other nodes' ranks; None: no exchange
    fingerprint: str = ""  # required of the rank's checkpoint; empty: same file


class Told(NamedTuple):
    """The outcome of one step. ``failed``: the step as a whole."""

    step: int
    seqs: tuple[SeqTold, ...] = ()
    failed: bool = False


class RankStep(NamedTuple):
    """A plan, and the outcomes that the executor has collected since the plan before."""

    plan: StepPlan
    told: tuple[Told, ...] = ()


class RankFailure(NamedTuple):
    """The rank cannot go on, and ends."""

    error: str  # name of the exception type
    text: str  # one line


class RankCounts(NamedTuple):
    """What a rank has done since its start; sent after each step."""

    busy_s: float = 0.0  # in which it computed, without waiting for another stage
    num_steps: int = 0
    bytes_sent: int = 0  # to other ranks: collectives, and the next stage
    peak_bytes: int = 0  # resident memory


class Answer(NamedTuple):
    """The result of the oldest plan that is out, and what the other ranks are told of it."""

    result: StepResult
    told: Told


KINDS = (RankBoot, RankStep, RankLoaded, RankFailure, RankCounts, Answer, LayerLoad)
_encoder = msgspec.msgpack.Encoder()
_decoders: list[msgspec.msgpack.Decoder[Any]] = [msgspec.msgpack.Decoder(kind) for kind in KINDS]


def encode(message: Any) -> bytes:
    """Return the frame of ``message``."""
    payload = _encoder.encode(message)
    return _HEAD.pack(KINDS.index(type(message)), len(payload)) + payload


class Channel:
    """One end of the connection between the executor and a rank. Not thread-safe."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, frame: bytes) -> None:
        """Send a frame of `encode`; blocks while the other side does not read. Raises OSError once it is dead."""
        self.sock.sendall(frame)

    def receive(self) -> Any:
        """Wait for the next message; None: the other side is dead."""
        head = self._read(_HEAD.size)
        if head is None:
            return None
        kind, size = _HEAD.unpack(head)
        payload = self._read(size)
        return None if payload is None else _decoders[kind].decode(payload)

    def _read(self, size: int) -> bytearray | None:
        data = bytearray(size)
        view, got = memoryview(data), 0
        while got < size:
            try:
                count = self.sock.recv_into(view[got:])
            except ConnectionResetError:
                return None
            if not count:
                return None
            got += count
        return data
