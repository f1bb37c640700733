"""`PeerServer`: gives the blocks of a `MemoryStore` to peers that prove the shared secret, on a thread per connection.

What it sends is a copy of its own, so the store goes on meanwhile, and a peer that stops reading holds nothing but its
connection, for a few seconds.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

from quire.clock import Clock, WallClock
from quire.errors import ConfigError
from quire.metrics.log import Log
from quire.tiers.memory import MemoryStore
from quire.tiers.peer_wire import (
    CHANGES,
    READ,
    Channel,
    PeerError,
    meet_taker,
    send_changes,
    take_blocks_question,
    take_changes_question,
)
from quire.tiers.record import header_of, short_root
from quire.tiers.spans import SPAN_BYTES

log = Log("kv-peers")


class PeerServer:
    """Listens at an address from the start until `close`."""

    def __init__(
        self, store: MemoryStore, address: tuple[str, int], root: str, secret: bytes, engine_id: bytes, *,
        meeting_s: float = 2.0, idle_s: float = 60.0, send_s: float = 5.0, max_connections: int = 64,
        clock: Clock | None = None,
    ) -> None:  # fmt: skip
        """``meeting_s``: both sides prove the secret within it. ``idle_s``: between questions.

        ``send_s``: a span of blocks leaves, and a block that is to come is waited for, within it.

        Raises:
            ConfigError: the address cannot be listened at.
        """
        self._store, self._root, self._secret, self._engine_id = store, short_root(root), secret, engine_id
        self._meeting_s, self._idle_s, self._send_s = meeting_s, idle_s, send_s
        self._max_connections = max_connections
        self._clock = clock or WallClock()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            self._listener = socket.create_server(address, family=family)
        except OSError as error:
            raise ConfigError(
                f"kv_share: {address[0]}:{address[1]} cannot be listened at: {error.strerror or error}",
                param="kv_share",
            ) from error
        self._is_closed = False
        threading.Thread(target=self._accept, name="quire-kv-peers", daemon=True).start()

    @property
    def port(self) -> int:
        """The port that it listens at."""
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """End all connections, and take no more."""
        self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for sock in self._open:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                sock, address = self._listener.accept()
            except OSError:
                continue  # the peer has gone again, or this is closed
            with self._lock:
                is_full = self._is_closed or len(self._open) >= self._max_connections
                if not is_full:
                    self._open.add(sock)
            if is_full:
                log.warning(
                    "peer_refused", address=address[0], reason=f"{self._max_connections} connections are open"
                )
                sock.close()
                continue
            threading.Thread(
                target=self._serve, args=(sock, address[0]), name="quire-kv-peer", daemon=True
            ).start()

    def _serve(self, sock: socket.socket, address: str) -> None:
        channel = Channel(sock, self._clock)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel.limit(self._meeting_s)
            if not meet_taker(channel, self._secret, self._root, self._engine_id):
                log.warning("peer_refused", address=address, reason="its model or its settings are others")
                return
            while True:
                channel.limit(self._idle_s)
                self._answer(channel)
        except PeerError as error:
            log.warning("peer_refused", address=address, reason=str(error))
        except OSError:
            pass  # it has gone, or said nothing for long
        finally:
            with self._lock:
                self._open.discard(sock)
            sock.close()

    def _answer(self, channel: Channel) -> None:
        question = channel.receive(1)
        if question == CHANGES:
            since, wait_s = take_changes_question(channel)
            changes = self._store.changes(since, min(wait_s, self._send_s))
            channel.limit(self._send_s)
            send_changes(channel, *changes)
        elif question == READ:
            wait_s, keys = take_blocks_question(channel)
            self._send_blocks(channel, keys, min(wait_s, self._send_s))
        else:
            raise PeerError(f"it asks {question!r}")

    def _send_blocks(self, channel: Channel, keys: list[bytes], wait_s: float) -> None:
        """Send blocks in spans, up to the first that does not come."""
        first = 0
        while first < len(keys) and self._store.wait_for(keys[first], wait_s):
            span = keys[first : first + self._span_length(keys[first:])]
            buffers = [memoryview(bytearray(self._store.num_bytes_of(key) or 0)) for key in span]
            count = self._store.read(span, buffers)
            parts: list[bytes | memoryview] = []
            for key, buffer in zip(span[:count], buffers, strict=False):
                parts += [b"\1", header_of(self._root, key, [buffer]), buffer]
            channel.limit(self._send_s)
            channel.send(parts)
            first += count
            if count < len(span):
                break
        if first < len(keys):
            channel.limit(self._send_s)
            channel.send([b"\0"])

    def _span_length(self, keys: list[bytes]) -> int:
        """Return how many of the blocks to send next, which are there: at least one."""
        num_bytes = 0
        for length, key in enumerate(keys):
            size = self._store.num_bytes_of(key)
            if length and (size is None or num_bytes + size > SPAN_BYTES):
                return length
            num_bytes += size or 0
        return len(keys)
