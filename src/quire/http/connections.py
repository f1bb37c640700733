"""Connections that hold a server up: requests sent by half, and clients that do not read their answers.

uvicorn waits for both without a limit. `ConnectionWatch` looks twice a second and ends a connection

    head     that has not sent a whole head of a request ``head_s`` after its first byte, or after it was opened
    body     that sends a body slower than ``body_rate``, beyond ``body_s``
    write    that has read nothing for ``write_s`` while an answer waits to be sent

A cut is logged and counted. The application sees a disconnect, so that a generation is aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from quire.http.held_bytes import LARGE
from quire.metrics.log import Log

Phase = Literal["head", "body", "write"]
SLOW_READER, HALF_REQUEST = "slow_reader", "half_request"  # reasons of a cut
_ANSWER = b"HTTP/1.1 %b\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
MAX_HEAD_BYTES = 64 * 1024
LOOK_EVERY_S = 0.5
# Requests after which memory may have grown.
WORTH_A_LOOK = 64
_HEAD_END_BYTES = 3
_BETWEEN_BYTES = 4  # a colon, a space and the end of the line
_OF_OFFERS = (b"upgrade", b"http2-settings")
log = Log("http")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a client may take; seconds, and bytes per second."""

    head_s: float = 15.0
    body_s: float = 30.0
    body_rate: float = 4096.0
    write_s: float = 60.0


class ClosedAtEnd(RequestResponseCycle):
    """A request of HTTP/1.0, which knows no chunks: an answer without a length ends where the connection does."""

    _has_length = True

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._has_length = any(
                name.lower() == b"content-length" for name, _ in message.get("headers", ())
            )
            if not self._has_length:
                self.chunked_encoding = False
        elif not self._has_length and not self.disconnected:
            if self.flow.write_paused:
                await self.flow.drain()
            if self.scope["method"] != "HEAD":
                self.transport.write(message.get("body", b""))
            message = {**message, "body": b""}
        await super().send(message)


class WatchedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which also counts what arrives, and refuses a head of more than `MAX_HEAD_BYTES`.

    An offer of another protocol than WebSocket (``Upgrade: h2c``, of Java's clients) is ignored, as RFC 9110 allows:
    the parser, which would leave the body to that protocol, gets the head once more without the offer.
    """

    num_received = 0  # bytes
    closes = False  # with its next answer
    on_idle: Callable[[WatchedProtocol], object] | None = None  # called after each answer
    _head_bytes = -1  # bytes read since a head began; -1: none has
    _head_tail = b""  # its last bytes; the mark of its end may have begun
    _in_message = False  # a request has come in part
    _has_body = False  # a byte of its body has come
    _is_offer = False  # the parser stops behind this head

    @property
    def is_idle(self) -> bool:
        """Whether the connection is between two requests: the client has nothing to get, and has sent nothing more."""
        answered = self.cycle is None or self.cycle.response_complete
        return answered and not (self._in_message or self.pipeline or self.transport.is_closing())

    def expect_request(self) -> None:
        """Give a connection that another process has served the time of one that waits for its next request."""
        if not self.num_received and self.timeout_keep_alive_task is None and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        self._in_message, self._has_body, self._is_offer = True, False, False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_bytes = -1
        if self.transport.is_closing():
            return
        num_bytes = len(self.url)
        for name, value in self.headers:
            num_bytes += len(name) + len(value) + _BETWEEN_BYTES
        if num_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
            return
        is_offer = self.parser.should_upgrade() and not self._should_upgrade()
        if is_offer and self.parser.get_method() != b"CONNECT":
            self._is_offer = True
            return
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is before:  # a WebSocket
            return
        if self.scope["http_version"] == "1.0":
            self.cycle.__class__ = ClosedAtEnd
            self.cycle.waiting_for_100_continue = False  # it would take that for the answer
        if self.closes:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._has_body = True
        if self.cycle is not None:  # else its head was refused
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_offer:
            return
        self._in_message = False
        if self.cycle is not None or self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        is_last = self.cycle.response_complete  # else the answer is to a request before it
        if is_last and self.expect_100_continue and self._in_message and not self._has_body:
            # The client may keep the body to itself, and the next request would pass for it.
            self.transport.close()
        super().on_response_complete()
        if self.on_idle is not None:
            # What was written leaves this process first.
            self.loop.call_soon(self.on_idle, self)

    def data_received(self, data: bytes) -> None:
        """Count ``data`` and handle it."""
        self.num_received += len(data)
        self._unset_keepalive_if_required()
        if len(data) + max(self._head_bytes, 0) > MAX_HEAD_BYTES and self._is_long_head(data):
            self._refuse_head()
            return
        if not self._in_message:
            self._head_tail = b""
        self._parse(data)
        if self._head_bytes >= 0:
            self._head_bytes += len(data)
            self._head_tail = (self._head_tail + data)[-_HEAD_END_BYTES:]

    def _is_long_head(self, data: bytes) -> bool:
        """Whether ``data`` begins with a head, or goes on with one, that has more than `MAX_HEAD_BYTES` in all."""
        if self._in_message and self._head_bytes < 0:
            return False
        before, tail = max(self._head_bytes, 0), self._head_tail if self._in_message else b""
        end = (tail + data).find(b"\r\n\r\n")
        return end < 0 or before + end - len(tail) > MAX_HEAD_BYTES

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            if not self.transport.is_closing():
                self.send_400_response("Invalid HTTP request received.")
        except httptools.HttpParserUpgrade as offer:
            if self._should_upgrade():
                self.handle_websocket_upgrade()
            elif self._is_offer:
                self._parse_without_offer(data[offer.args[0] :])

    def _parse_without_offer(self, rest: bytes) -> None:
        """Parse the head that has come once more, without its offer, and then ``rest``."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                value = b", ".join(token for token in tokens if token.lower() not in _OF_OFFERS)
            if name not in _OF_OFFERS:
                lines.append(b"%b: %b" % (name, value))
        self.parser = httptools.HttpRequestParser(self)
        with suppress(AttributeError):  # httptools before 0.6.3
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # like uvicorn's own
        self._parse(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    def _refuse_head(self) -> None:
        self.transport.write(_ANSWER % b"431 Request Header Fields Too Large")
        self.transport.close()


@dataclass(slots=True)
class _Seen:
    """The phase in which a connection was when `ConnectionWatch` last checked it."""

    phase: Phase
    cycle: RequestResponseCycle | None
    since_s: float  # when the phase began, or when something was last written
    # Bytes received when the phase began, or waiting to be written.
    progress: int


class ConnectionWatch:
    """Looks at the connections of one server. ``on_cut`` is told the reason of each cut."""

    def __init__(
        self, patience: Patience, on_cut: Callable[[str], None], on_use: Callable[[], None] = lambda: None
    ) -> None:
        """``on_use`` is called after many requests, and after large bodies: memory may have grown."""
        self._next_look: asyncio.TimerHandle | None = None
        self._on_use = on_use
        # Requests and bytes of large bodies at the last call.
        self._used = (0, 0)
        self._patience = patience
        self._on_cut = on_cut
        self._seen: dict[WatchedProtocol, _Seen] = {}

    def start(self, server: ServerState) -> None:
        """Look at the connections of ``server`` from now on, until `stop`."""
        loop = asyncio.get_running_loop()
        self._next_look = loop.call_later(LOOK_EVERY_S, self.start, server)
        self.look(watched(server.connections), loop.time())
        used = server.total_requests // WORTH_A_LOOK, LARGE.taken
        if used != self._used:
            self._used = used
            self._on_use()

    def stop(self) -> None:
        """Look no more."""
        if self._next_look is not None:
            self._next_look.cancel()

    def look(self, connections: Iterable[WatchedProtocol], now: float) -> None:
        """End the connections that took too long."""
        seen: dict[WatchedProtocol, _Seen] = {}
        for connection in connections:
            phase = _find_phase(connection)
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
            if _find_phase(connection) in ("head", "body"):
                _answer(connection, b"503 Service Unavailable")

    def _limit_s(self, seen: _Seen, connection: WatchedProtocol) -> float:
        patience = self._patience
        if seen.phase == "body":
            return patience.body_s + (connection.num_received - seen.progress) / patience.body_rate
        return patience.head_s if seen.phase == "head" else patience.write_s

    def _cut(self, connection: WatchedProtocol, phase: Phase, seconds: float) -> None:
        if not connection.num_received:  # browsers open connections ahead, and may need none
            connection.transport.close()
            return
        reason = SLOW_READER if phase == "write" else HALF_REQUEST
        path = None if phase == "head" else connection.scope["path"]
        log.warning(reason, phase=phase, client=connection.client, path=path, seconds=round(seconds, 1))
        self._on_cut(reason)
        if phase == "write":
            connection.transport.abort()
        else:
            _answer(connection, b"408 Request Timeout")


def watched(connections: Iterable[object]) -> list[WatchedProtocol]:
    """Return the connections that are no WebSockets."""
    return [connection for connection in connections if isinstance(connection, WatchedProtocol)]


def _find_phase(connection: WatchedProtocol) -> Phase | None:
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
