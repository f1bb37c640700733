"""Cache events: what a gateway needs to route a request to the replica that holds its prefix.

The buffer is bounded and never blocks the engine: when it is not drained the oldest events are dropped, and the next
drain starts with `EventsLost`, after which the reader asks for a snapshot (`PrefixCache.snapshot`) and starts afresh.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A block can be hit from now on, in the named cache groups."""

    block_hash: bytes
    parent_hash: bytes
    token_ids: tuple[int, ...]  # [block_size]
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A block can no longer be hit in the named cache groups."""

    block_hash: bytes
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EventsLost:
    """The buffer overflowed: ``num_lost`` events before the following ones are missing."""

    num_lost: int


CacheEvent = BlockStored | BlockRemoved | EventsLost


class EventBuffer:
    """The last ``capacity`` events since the previous drain. A cache without one does no work for it.

    ``with_tokens``: whether its reader wants `BlockStored.token_ids`, which then stay in memory with each block.
    """

    def __init__(self, capacity: int = 10_000, *, with_tokens: bool = True) -> None:
        assert capacity > 0
        self.with_tokens = with_tokens
        self._events: deque[CacheEvent] = deque(maxlen=capacity)
        self._num_lost = 0

    def add(self, event: BlockStored | BlockRemoved) -> None:
        if len(self._events) == self._events.maxlen:
            self._num_lost += 1
        self._events.append(event)

    def forget(self) -> None:
        """The tree was cleared: its reader starts afresh, from a snapshot."""
        self._num_lost += len(self._events) + 1
        self._events.clear()

    def drain(self) -> list[CacheEvent]:
        """Return the events since the last call, oldest first, and forget them."""
        events: list[CacheEvent] = [EventsLost(self._num_lost)] if self._num_lost else []
        events.extend(self._events)
        self._events.clear()
        self._num_lost = 0
        return events


# Events on a wire: `EVENT_BYTES` each. A byte with the groups as bits (the last one for all groups from the seventh on)
# and 128 for a block that was removed, then the first bytes of the block's hash.
SHORT_HASH_BYTES = 16
EVENT_BYTES = 1 + SHORT_HASH_BYTES
_REMOVED = 128


def pack(events: Iterable[BlockStored | BlockRemoved]) -> bytes:
    """Return events as bytes, without parents and tokens."""
    packed = bytearray()
    for event in events:
        mask = _REMOVED if isinstance(event, BlockRemoved) else 0
        for group in event.groups:
            mask |= 1 << min(group, 6)
        packed.append(mask)
        packed += event.block_hash[:SHORT_HASH_BYTES]
    return bytes(packed)


def unpack(packed: bytes) -> Iterator[BlockStored | BlockRemoved]:
    """Yield the events of `pack`, with short hashes."""
    for start in range(0, len(packed), EVENT_BYTES):
        mask, short = packed[start], packed[start + 1 : start + EVENT_BYTES]
        groups = (0,) if mask & 127 == 1 else tuple(group for group in range(7) if mask >> group & 1)
        yield BlockRemoved(short, groups) if mask & _REMOVED else BlockStored(short, b"", (), groups)
