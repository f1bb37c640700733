"""`Peer`: another replica whose blocks this one may take: which it has, and their bytes.

A thread keeps one connection to the peer, over which it says what blocks come and go, so what it has is known without a
question. Blocks are read over connections of their own. Whatever the peer does, a read ends in time, and after a
failure nothing is asked of it for a while.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from quire.clock import Clock, WallClock
from quire.metrics.log import Log
from quire.tiers.peer_wire import Channel, PeerError, ask_blocks, ask_changes, meet_giver
from quire.tiers.record import HEADER_BYTES, is_whole, read_header, short_root
from quire.tiers.store import StoreCounts

log = Log("kv-peers")


class Peer:
    """The peer at one address."""

    def __init__(
        self, address: tuple[str, int], root: str, secret: bytes, *,
        timeout_s: float = 1.0, pause_s: float = 5.0, min_bytes_per_s: float = 20e6, follows: bool = True,
        clock: Clock | None = None,
    ) -> None:  # fmt: skip
        """``timeout_s``: of connecting, of proving the secret, and of the first byte of an answer.

        ``pause_s``: without the peer after it has failed. ``min_bytes_per_s``: one that sends less is no gain.
        ``follows``: a thread calls `follow`.
        """
        self.name = f"{address[0]}:{address[1]}"
        self.engine_id = ""
        self.counts = StoreCounts()
        self._address, self._root, self._secret = address, short_root(root), secret
        self._timeout_s, self._pause_s, self._clock = timeout_s, pause_s, clock or WallClock()
        self._min_bytes_per_s = min_bytes_per_s
        self._keys: set[bytes] = set()
        self._knows_all = False  # apart from what changes from now on
        self._lock = threading.Lock()
        self._retry_at_s = float("-inf")
        self._last_problem = ""
        self._closed = threading.Event()
        if follows:
            threading.Thread(target=self._keep_following, name="quire-kv-peer", daemon=True).start()

    def has(self, key: bytes) -> bool:
        """Whether it said that it has a block; False while it fails."""
        return key in self._keys and not self._is_off()

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview], wait_s: float = 0.0) -> int:
        """Fill buffers; return how many leading blocks are whole. Each may take ``wait_s`` to come into being there."""
        if self._is_off() or not keys:
            return 0
        num_whole = 0
        try:
            with self._connected() as channel:
                ask_blocks(channel, keys, wait_s)
                for key, buffer in zip(keys, into, strict=True):
                    channel.limit(self._timeout_s + wait_s + buffer.nbytes / self._min_bytes_per_s)
                    if channel.receive(1) != b"\1":
                        self._forget(key, "blocks_lost")
                        break
                    if not self._take(channel, key, buffer):
                        self._forget(key, "blocks_damaged")
                        break
                    num_whole += 1
        except (OSError, PeerError) as error:
            with self._lock:
                self.counts.read_errors += 1
            self._failed(error)
        with self._lock:
            self.counts.blocks_read += num_whole
            self.counts.bytes_read += sum(buffer.nbytes for buffer in into[:num_whole])
        return num_whole

    def follow(self, wait_s: float = 1.0, *, once: bool = False) -> None:
        """Learn which blocks there are, until the peer is gone. ``once``: only those that there are now."""
        try:
            with self._connected() as channel:
                now = 0
                while not self._closed.is_set():
                    since = now if self._knows_all else 0
                    channel.limit(self._timeout_s + (wait_s if since else 0.0))
                    now, is_all, added, removed = ask_changes(channel, since, wait_s if since else 0.0)
                    self._note(is_all, added, removed)
                    if once:
                        return
                    if not now:  # it has nothing yet
                        self._closed.wait(wait_s / 10)
        except (OSError, PeerError) as error:
            self._failed(error)

    def num_keys(self) -> int:
        """Return how many blocks it has, as far as it is known."""
        return len(self._keys)

    def close(self) -> None:
        """Ask nothing more."""
        self._closed.set()
        self._keys = set()

    @contextmanager
    def _connected(self) -> Iterator[Channel]:
        with closing(socket.create_connection(self._address, self._timeout_s)) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel = Channel(sock, self._clock)
            channel.limit(self._timeout_s)
            engine_id = meet_giver(channel, self._secret, self._root)
            if engine_id is None:
                raise PeerError("its model or its settings are others")
            self.engine_id = engine_id.hex()
            yield channel

    def _take(self, channel: Channel, key: bytes, buffer: memoryview) -> bool:
        """Receive a block, and return whether it is whole. What follows a block of another size is not understood."""
        header = channel.receive(HEADER_BYTES)
        found = read_header(self._root, header)
        if found is None or found.num_bytes != buffer.nbytes:
            return False
        channel.receive_into(buffer)
        return is_whole(self._root, key, header, buffer)

    def _note(self, is_all: bool, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        self._last_problem = ""
        with self._lock:
            if is_all:
                self._keys, self._knows_all = set(added), True
            elif self._knows_all:
                self._keys.update(added)
                self._keys.difference_update(removed)

    def _forget(self, key: bytes, count: str) -> None:
        with self._lock:
            self._keys.discard(key)
            setattr(self.counts, count, getattr(self.counts, count) + 1)

    def _failed(self, error: Exception) -> None:
        """Do without the peer for a while; what it has is learned anew."""
        with self._lock:
            self._keys, self._knows_all = set(), False
        self._retry_at_s = self._clock.now() + self._pause_s
        if str(error) != self._last_problem and not self._closed.is_set():
            self._last_problem = str(error)
            log.warning("peer_paused", peer=self.name, seconds=self._pause_s, error=str(error))

    def _is_off(self) -> bool:
        return self._closed.is_set() or self._clock.now() < self._retry_at_s

    def _keep_following(self) -> None:
        while not self._closed.is_set():
            self.follow()
            self._closed.wait(max(0.0, self._retry_at_s - self._clock.now()))
