"""`ProcessClient`: an engine in a child process, over two ZeroMQ sockets; and the messages of both sides. Torch-free.

send     ──> PUSH ──> inbox.ipc     (any thread)
receive  <── PULL <── events.ipc    (one thread at a time)

A message is two frames: the name of its type, and its value as msgpack. Dataclasses and named tuples are encoded as
they are; msgspec checks the types when it decodes.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from typing import Any, NamedTuple, get_args

import msgspec
import zmq

from quire import errors
from quire.config import EngineConfig
from quire.engine.client import LOADING, EngineHealth, EngineInfo
from quire.engine.heartbeat import HangWatch, Heartbeat
from quire.engine.messages import Message, Reply
from quire.engine.spawn import HEARTBEAT, EngineProcess
from quire.errors import EngineDeadError, QuireError
from quire.metrics.engine_stats import EngineStats
from quire.metrics.log import LogStyle
from quire.request import TokenEvent


class ProcessClient:
    """The parent's side of an engine process; an `EngineClient`."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        executor: str = "local",
        log_level: str = "warning",
        log_format: LogStyle = "human",
        process: EngineProcess | None = None,
        watches_hangs: bool = True,
    ) -> None:
        """``process``: a child that was started earlier with the same ``executor``. None: start one now.

        ``watches_hangs``: the child notes each tick of its loop, so that `health` tells a hung one.

        Raises:
            OSError: there is no disk, memory or file for it; nothing is left behind.
        """
        self._process = process or EngineProcess(executor)
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PUSH)
        self._events = self._context.socket(zmq.PULL)
        for end in (self._inbox, self._events):
            end.set_hwm(0)
        self._inbox.reconnect_ivl = 5  # ms; the child binds once it is up
        try:
            page = Heartbeat(self._process.directory / HEARTBEAT) if watches_hangs else None
            self._events.bind(f"ipc://{self._process.directory}/events.ipc")
        except (OSError, zmq.ZMQError) as error:
            self._context.destroy(linger=0)
            self._process.close(0.0)
            raise OSError(error.errno, error.strerror) from error
        self._inbox.connect(f"ipc://{self._process.directory}/inbox.ipc")
        self._wake, self._woken = socket.socketpair()
        self._poller = zmq.Poller()
        for source in (self._events, self._process.life, self._woken):
            self._poller.register(source, zmq.POLLIN)
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._closed = False
        self._dead: EngineDeadError | None = None
        self._stats = EngineStats()
        self._replies: list[Reply] = []
        self._watch = None if page is None else HangWatch(page, time.monotonic())
        self._is_loaded = False
        self.send(Boot(config, log_level, log_format, watches_hangs))

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> EngineInfo:
        value = self._next(None)
        if isinstance(value, Failure):
            raise _load_error(value)
        if value is None:
            raise self._dead or EngineDeadError("The engine was closed while it was loading.")
        assert isinstance(value, EngineInfo)
        self._is_loaded = True
        return value

    def send(self, message: Message | Boot) -> None:
        with self._sending:
            if not self._closed:
                self._inbox.send_multipart(encode(message))

    def receive(self, timeout_s: float | None = None) -> list[TokenEvent]:
        while True:
            value = self._next(timeout_s)
            if isinstance(value, Events):
                self._replies += value.replies
                return value.events
            if isinstance(value, EngineStats):
                self._stats = value
            elif isinstance(value, Failure):
                self._dead = EngineDeadError(f"The engine stopped: {value.text}")
            elif self._dead is not None:
                raise self._dead
            else:
                return []

    def replies(self) -> list[Reply]:
        replies, self._replies = self._replies, []
        return replies

    def stats(self) -> EngineStats:
        return self._stats

    def health(self) -> EngineHealth:
        if self._dead is not None or self._closed:
            return EngineHealth("dead", str(self._dead or "the engine was closed"))
        if self._watch is None:
            return EngineHealth() if self._is_loaded else EngineHealth("loading", LOADING)
        pulse = self._watch.look(time.monotonic())
        if pulse.is_loading:
            return EngineHealth("loading", LOADING)
        if not pulse.is_hung:
            return EngineHealth(overdue_s=pulse.overdue_s)
        reason = (
            f"step {pulse.step} was expected to take {pulse.predicted_s:.3g} s, and the engine (process {self.pid}, "
            f"state {self._process.state()}) has given no sign of life for {pulse.age_s:.3g} s"
        )
        return EngineHealth("hung", reason, pulse.overdue_s)

    def dump(self, *, is_last: bool = False) -> str:
        return self._process.dump(is_last=is_last)

    def close(self) -> None:
        grace_s = 0.0 if self.health().status == "hung" else 5.0
        with self._sending:
            if self._closed:
                return
            self._closed = True
        self._wake.send(b"x")
        with self._receiving, self._sending:
            self._context.destroy(linger=0)
            self._process.close(grace_s)
            self._wake.close()
            self._woken.close()

    def _next(self, timeout_s: float | None) -> Any:
        """Return the next value from the child; None after the timeout, once closed, or if the child is dead."""
        with self._receiving:
            if self._closed:
                return None
            ready = dict(self._poller.poll(None if timeout_s is None else math.ceil(timeout_s * 1e3)))
            # What the child sent before it died still counts, so the events are read first.
            if self._events in ready:
                return decode(self._events.recv_multipart())
            if self._closed or not ready:
                return None
            if self._events.poll(100):  # a last message may still be in ZeroMQ's thread
                return decode(self._events.recv_multipart())
            if self._dead is None:
                self._dead = EngineDeadError(f"The engine process {self._process.fate()}.")
            return None


def _load_error(failure: Failure) -> QuireError:
    kind = getattr(errors, failure.error, None)
    if isinstance(kind, type) and issubclass(kind, errors.ModelLoadError | errors.ConfigError):
        return kind(failure.text)
    return EngineDeadError(f"The engine could not start: {failure.text}")


class Boot(NamedTuple):
    """Parent → child, the first message: what to load."""

    config: EngineConfig
    log_level: str
    log_format: LogStyle = "human"
    watches_hangs: bool = True


class Events(NamedTuple):
    """Child → parent: the events of one step, and the replies to calls that were handled before it."""

    events: list[TokenEvent]
    replies: list[Reply]


class Failure(NamedTuple):
    """Child → parent, the last message: the engine cannot go on."""

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
    """Return the value of two frames. Both ends are the same program, so an undecodable frame is a bug."""
    kind, payload = frames
    return _decoders[kind].decode(payload)
