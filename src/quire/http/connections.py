"""Connections that hold a server up: requests sent by half, and clients that do not read their answers.

uvicorn waits for both without a limit. `ConnectionWatch.look` is called about twice a second and ends a connection

    head     that has not sent a whole head of a request ``head_s`` after its first byte, or after it was opened
    body     that sends a body slower than ``body_rate``, beyond ``body_s``
    write    that has read nothing for ``write_s`` while an answer waits to be sent

A cut is logged and counted. The application sees a disconnect, so that a generation is aborted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quire.metrics.log import Log

Phase = Literal["head", "body", "write"]
SLOW_READER, HALF_REQUEST = "slow_reader", "half_request"  # reasons of a cut
_ANSWER = b"HTTP/1.1 %b\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
MAX_HEAD_BYTES = 64 * 1024
log = Log("http")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a client may take; seconds, and bytes per second."""

    head_s: float = 15.0
    body_s: float = 30.0
    body_rate: float = 4096.0
    write_s: float = 60.0


class WatchedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which also counts what arrives, and refuses a head of more than `MAX_HEAD_BYTES`."""

    num_received = 0  # bytes
    _head_bytes = -1  # of a head that has begun, in whole reads; -1: none has

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_bytes = -1
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Count ``data`` and handle it."""
        self.num_received += len(data)
        super().data_received(data)
        if self._head_bytes < 0 or self.transport.is_closing():
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self.transport.write(_ANSWER % b"431 Request Header Fields Too Large")
            self.transport.close()


@dataclass(slots=True)
class _Seen:
    """The phase in which a connection was when `ConnectionWatch` last checked it."""

    phase: Phase
    cycle: RequestResponseCycle | None
    since_s: float  # when the phase began, or when something was last written
    progress: int  # bytes: received when the phase began, or waiting to be written


class ConnectionWatch:
    """Looks at the connections of one server. ``on_cut`` is told the reason of each cut."""

    def __init__(self, patience: Patience, on_cut: Callable[[str], None]) -> None:
        self._patience = patience
        self._on_cut = on_cut
        self._seen: dict[WatchedProtocol, _Seen] = {}

    def look(self, connections: Iterable[WatchedProtocol], now: float) -> None:
        """End the connections that took too long."""
        seen: dict[WatchedProtocol, _Seen] = {}
        for connection in connections:
            phase = _phase_of(connection)
            if phase is None:
                continue
            waiting = connection.transport.get_write_buffer_size()
            before = self._seen.get(connection)
            if before is None or before.phase != phase or before.cycle is not connection.cycle:
                progress = waiting if phase == "write" else connection.num_received
                before = _Seen(phase, connection.cycle, now, progress)
            elif phase == "write" and waiting != before.progress:
                before.since_s, before.progress = now, waiting
            if now - before.since_s > self._limit_s(before, connection):
                self._cut(connection, phase, now - before.since_s)
            else:
                seen[connection] = before
        self._seen = seen

    def end_half_sent(self, connections: Iterable[WatchedProtocol]) -> None:
        """The server ends: do not wait for the rest of requests."""
        for connection in connections:
            if _phase_of(connection) in ("head", "body"):
                _answer(connection, b"503 Service Unavailable")

    def _limit_s(self, seen: _Seen, connection: WatchedProtocol) -> float:
        patience = self._patience
        if seen.phase == "body":
            return patience.body_s + (connection.num_received - seen.progress) / patience.body_rate
        return patience.head_s if seen.phase == "head" else patience.write_s

    def _cut(self, connection: WatchedProtocol, phase: Phase, seconds: float) -> None:
        reason = SLOW_READER if phase == "write" else HALF_REQUEST
        path = None if phase == "head" else connection.scope["path"]
        log.warning(reason, phase=phase, client=connection.client, path=path, seconds=round(seconds, 1))
        self._on_cut(reason)
        if phase == "write":
            connection.transport.abort()
        else:
            _answer(connection, b"408 Request Timeout")


def _phase_of(connection: WatchedProtocol) -> Phase | None:
    """Return what the server waits for, if it is the client's turn."""
    cycle = connection.cycle
    if connection.transport.is_closing():
        return None
    if connection.flow.write_paused:
        return "write"
    if cycle is None or cycle.response_complete:
        return (
            "head" if connection.timeout_keep_alive_task is None else None
        )  # idle: uvicorn has a timer for it
    return "body" if cycle.more_body and not connection.flow.read_paused else None


def _answer(connection: WatchedProtocol, status: bytes) -> None:
    """Answer with ``status``, unless an answer has begun, and close."""
    if connection.cycle is None or not connection.cycle.response_started:
        connection.transport.write(_ANSWER % status)
    connection.transport.close()
