"""Cache events: what a gateway needs to route a request to the replica that holds its prefix.

The buffer is bounded and never blocks the engine: when it is not drained the oldest events are dropped, and the next
drain starts with `EventsLost`, after which the reader asks for a snapshot (`PrefixCache.snapshot`) and starts afresh.
"""

from __future__ import annotations

from collections import deque
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
    """The last ``capacity`` events since the previous drain. A cache without one does no work for it."""

    def __init__(self, capacity: int = 10_000) -> None:
        assert capacity > 0
        self._events: deque[CacheEvent] = deque(maxlen=capacity)
        self._num_lost = 0

    def add(self, event: BlockStored | BlockRemoved) -> None:
        if len(self._events) == self._events.maxlen:
            self._num_lost += 1
        self._events.append(event)

    def drain(self) -> list[CacheEvent]:
        """Return the events since the last call, oldest first, and forget them."""
        events: list[CacheEvent] = [EventsLost(self._num_lost)] if self._num_lost else []
        events.extend(self._events)
        self._events.clear()
        self._num_lost = 0
        return events
