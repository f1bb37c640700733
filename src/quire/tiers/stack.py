"""`TierStack`: several stores of one engine, each block read where it is quickest to have.

What an engine writes goes to all of them. A read asks, block by block, the store whose reads have taken the fewest
seconds per byte among those that have the block; what it does not give is asked of the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields

from quire.clock import Clock
from quire.tiers.store import BlockStore, StoreCounts


class _Speed:
    """Seconds per byte of the reads of one store; 0 before the first."""

    def __init__(self) -> None:
        self.byte_s = 0.0

    def note(self, seconds: float, num_bytes: int) -> None:
        latest = seconds / max(1, num_bytes)
        self.byte_s = latest if not self.byte_s else 0.7 * self.byte_s + 0.3 * latest

    def forgive(self) -> None:
        """Another store was read instead: after many of these this one is tried again."""
        self.byte_s *= 0.98


class TierStack:
    """Stores in the order in which they are asked while their speeds are not known."""

    def __init__(self, stores: Sequence[BlockStore], clock: Clock) -> None:
        self.name = "+".join(store.name for store in stores)
        self.stores = tuple(stores)
        self._clock = clock
        self._speeds = {store.name: _Speed() for store in stores}

    def contains(self, keys: Sequence[bytes]) -> int:
        """Return how many leading keys some store has."""
        first = 0
        while first < len(keys):
            count = max(store.contains(keys[first:]) for store in self.stores)
            if not count:
                break
            first += count
        return first

    def kept(self, keys: Sequence[bytes]) -> int:
        """Return how many leading keys need not be written to any store."""
        return min(store.kept(keys) for store in self.stores)

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview], giver: str = "") -> int:
        """Fill buffers in runs of blocks from one store; ``giver``: for the store of peers."""
        first = 0
        while first < len(keys):
            count = self._read_run(keys[first:], into[first:])
            if not count:
                break
            first += count
        if giver and first < len(keys):
            for store in self.stores:
                first += store.read(keys[first:], into[first:], giver)
        return first

    def write(self, keys: Sequence[bytes], blocks: Sequence[Sequence[memoryview]]) -> int:
        """Write blocks to each store; return how many leading ones the store with the most room has now."""
        return max(store.write(keys, blocks) for store in self.stores)

    def counts(self) -> StoreCounts:
        """Return the sums over the stores."""
        total = StoreCounts()
        for store in self.stores:
            counts = store.counts()
            for field in fields(StoreCounts):
                setattr(total, field.name, getattr(total, field.name) + getattr(counts, field.name))
        return total

    def close(self) -> None:
        """Close all stores."""
        for store in self.stores:
            store.close()

    def _read_run(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> int:
        """Read blocks from the quickest store that gives the first; return how many are whole."""
        for store, num_to_read in self._places(keys):
            start_s = self._clock.now()
            count = store.read(keys[:num_to_read], into[:num_to_read])
            num_bytes = sum(buffer.nbytes for buffer in into[: max(1, count)])
            self._speeds[store.name].note(self._clock.now() - start_s, num_bytes)
            for name, speed in self._speeds.items():
                if name != store.name:
                    speed.forgive()
            if count:
                return count
        return 0

    def _places(self, keys: Sequence[bytes]) -> Iterator[tuple[BlockStore, int]]:
        """Yield the stores that have the first key, the quickest first, and how many blocks to read there."""
        ranked = sorted(self.stores, key=lambda store: self._speeds[store.name].byte_s)
        quicker: list[BlockStore] = []
        for store in ranked:
            num_there = store.contains(keys)
            if num_there:
                yield store, self._num_before(quicker, keys[:num_there])
            else:
                quicker.append(store)

    @staticmethod
    def _num_before(stores: Sequence[BlockStore], keys: Sequence[bytes]) -> int:
        """Return how many leading keys none of ``stores`` has."""
        for index, key in enumerate(keys):
            if any(store.contains([key]) for store in stores):
                return index
        return len(keys)
