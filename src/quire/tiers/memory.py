"""`MemoryStore`: blocks in this process's memory, from which peers read, within a bound.

A block that was written or asked for within the last seconds is leased: it stays until its lease ends, so that what a
prompt has just left there is not evicted before the peer that waits for it comes. Where only leased blocks could make
room, a write is refused. What a reader gets is a copy, so an eviction never changes bytes that are being sent.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from quire.clock import Clock, WallClock
from quire.tiers.record import HEADER_BYTES, header_of, is_whole, short_root
from quire.tiers.store import StoreCounts


class Changes(NamedTuple):
    """What has changed up to the change number ``now``. ``is_all``: ``added`` is everything that there is."""

    now: int
    is_all: bool
    added: list[bytes]
    removed: list[bytes]


class _Kept:
    """A block: its header, its bytes, and when its lease ends."""

    __slots__ = ("leased_until_s", "value")

    def __init__(self, value: bytes, leased_until_s: float) -> None:
        self.value, self.leased_until_s = value, leased_until_s


class MemoryStore:
    """The blocks of one root, of at most ``size_bytes`` together. The least recently used go first."""

    name = "memory"

    def __init__(
        self,
        size_bytes: int,
        root: str,
        *,
        lease_s: float = 10.0,
        max_changes: int = 65_536,
        clock: Clock | None = None,
    ) -> None:
        """``max_changes``: a reader that is further behind is told of everything that there is."""
        self._root, self._size_bytes, self._lease_s = short_root(root), size_bytes, lease_s
        self._clock = clock or WallClock()
        self._blocks: OrderedDict[bytes, _Kept] = OrderedDict()  # the least recently used first
        self._changes: deque[tuple[bytes, bool]] = deque(maxlen=max_changes)  # key, whether it was added
        self._num_changes = 0
        self._counts = StoreCounts()
        self._changed = threading.Condition()
        self._is_closed = False

    def contains(self, keys: Sequence[bytes]) -> int:
        """Return how many leading keys there are."""
        return next((index for index, key in enumerate(keys) if key not in self._blocks), len(keys))

    def kept(self, keys: Sequence[bytes]) -> int:
        """As `contains`."""
        return self.contains(keys)

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview], giver: str = "") -> int:
        """Copy blocks, and renew their leases."""
        for index, (key, buffer) in enumerate(zip(keys, into, strict=True)):
            value = self._touch(key)
            payload = memoryview(b"" if value is None else value)[HEADER_BYTES:]
            is_good = payload.nbytes == buffer.nbytes
            if value is None or not (is_good and is_whole(self._root, key, value[:HEADER_BYTES], payload)):
                self._lose(key, is_damaged=value is not None)
                return index
            buffer[:] = payload
            with self._changed:
                self._counts.blocks_read += 1
                self._counts.bytes_read += buffer.nbytes
        return len(keys)

    def write(self, keys: Sequence[bytes], blocks: Sequence[Sequence[memoryview]]) -> int:
        """Keep copies, as far as there is room."""
        for index, (key, block) in enumerate(zip(keys, blocks, strict=True)):
            if self._touch(key) is not None:
                continue
            value = b"".join((header_of(self._root, key, block), *block))
            if not self._keep(key, value):
                with self._changed:
                    self._counts.blocks_refused += len(keys) - index
                return index
        return len(keys)

    def num_bytes_of(self, key: bytes) -> int | None:
        """Return the bytes of a block; None: it is not there."""
        with self._changed:
            kept = self._blocks.get(key)
        return None if kept is None else len(kept.value) - HEADER_BYTES

    def wait_for(self, key: bytes, timeout_s: float) -> bool:
        """Return whether a block is there, or comes within ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._blocks or self._is_closed, timeout_s)
            return key in self._blocks

    def changes(self, since: int, timeout_s: float) -> Changes:
        """Return what has changed after the change ``since``, as soon as there is something; 0: everything."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_changes != since or self._is_closed, timeout_s)
            num_new = self._num_changes - since
            if since <= 0 or not 0 <= num_new <= len(self._changes):
                return Changes(self._num_changes, True, list(self._blocks), [])
            last = dict(self._changes[-number] for number in range(num_new, 0, -1))
        added = [key for key, is_added in last.items() if is_added]
        return Changes(since + num_new, False, added, [key for key, is_added in last.items() if not is_added])

    def counts(self) -> StoreCounts:
        """Return the sums, and what there is now."""
        with self._changed:
            return replace(self._counts, num_blocks=len(self._blocks))

    def close(self) -> None:
        """Forget everything, and let those that wait go on."""
        with self._changed:
            self._is_closed = True
            self._blocks.clear()
            self._changed.notify_all()

    def _touch(self, key: bytes) -> bytes | None:
        """Renew the lease of a block, and return its header and bytes."""
        with self._changed:
            kept = self._blocks.get(key)
            if kept is None:
                return None
            kept.leased_until_s = self._clock.now() + self._lease_s
            self._blocks.move_to_end(key)
            return kept.value

    def _keep(self, key: bytes, value: bytes) -> bool:
        """Add a block where there is room, or where blocks without a lease make it."""
        now_s = self._clock.now()
        with self._changed:
            if self._is_closed or len(value) > self._size_bytes:
                return False
            while self._counts.size_bytes + len(value) > self._size_bytes:
                oldest = next(iter(self._blocks))
                if self._blocks[oldest].leased_until_s > now_s:
                    return False
                self._remove(oldest)
                self._counts.blocks_evicted += 1
            self._blocks[key] = _Kept(value, now_s + self._lease_s)
            self._counts.size_bytes += len(value)
            self._counts.blocks_written += 1
            self._counts.bytes_written += len(value) - HEADER_BYTES
            self._counts.wear_bytes += len(value)
            self._note(key, is_added=True)
        return True

    def _lose(self, key: bytes, *, is_damaged: bool) -> None:
        with self._changed:
            self._counts.blocks_damaged += is_damaged
            self._counts.blocks_lost += not is_damaged
            if key in self._blocks:
                self._remove(key)

    def _remove(self, key: bytes) -> None:
        self._counts.size_bytes -= len(self._blocks.pop(key).value)
        self._note(key, is_added=False)

    def _note(self, key: bytes, *, is_added: bool) -> None:
        self._changes.append((key, is_added))
        self._num_changes += 1
        self._changed.notify_all()
