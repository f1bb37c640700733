"""Which replica holds which prefix: chain hashes (`quire.cache.block_hash`) and who has them.

A chain hash names everything up to the end of its block, so there is no tree to walk: a prefix is held as far as its
hashes are, one after the other, and one pass over a request's chain tells the depth at every replica.

    PredictedIndex    what was sent where, the least recently used going first: needs no word from the replicas
    ReportedIndex     what the replicas say in their cache events (`quire.cache.events`)
    PendingIndex      what requests on their way will leave: covers the gap between sending and the replica's report
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from quire.cache.events import BlockRemoved, BlockStored, CacheEvent, EventsLost


class Holders:
    """Block hash → the set of replicas that hold it, as bits."""

    def __init__(self) -> None:
        self._masks: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._masks)

    def add(self, block_hash: bytes, replica: int) -> None:
        self._masks[block_hash] = self._masks.get(block_hash, 0) | 1 << replica

    def remove(self, block_hash: bytes, replica: int) -> None:
        mask = self._masks.get(block_hash, 0) & ~(1 << replica)
        if mask:
            self._masks[block_hash] = mask
        else:
            self._masks.pop(block_hash, None)

    def depths(self, chain: Sequence[bytes], num_replicas: int) -> list[int]:
        """Return per replica how many of ``chain``'s first blocks it holds without a gap."""
        depths = [0] * num_replicas
        left = (1 << num_replicas) - 1
        for depth, block_hash in enumerate(chain):
            still = left & self._masks.get(block_hash, 0)
            gone = left ^ still
            while gone:
                depths[(gone & -gone).bit_length() - 1] = depth
                gone &= gone - 1
            if not still:
                return depths
            left = still
        while left:
            depths[(left & -left).bit_length() - 1] = len(chain)
            left &= left - 1
        return depths


class PredictedIndex:
    """What the router sent where. A replica is taken to hold the last ``capacity`` blocks that it was sent."""

    def __init__(self, capacity: int) -> None:
        assert capacity > 0
        self._capacity = capacity
        self.holders = Holders()
        self._blocks: dict[int, OrderedDict[bytes, None]] = {}

    def sent(self, replica: int, chain: Sequence[bytes]) -> None:
        """A request with this chain went to ``replica``."""
        blocks = self._blocks.setdefault(replica, OrderedDict())
        for block_hash in reversed(chain):  # the front is used last, so a prefix loses its end first
            if block_hash in blocks:
                blocks.move_to_end(block_hash)
            else:
                blocks[block_hash] = None
                self.holders.add(block_hash, replica)
        while len(blocks) > self._capacity:
            oldest, _ = blocks.popitem(last=False)
            self.holders.remove(oldest, replica)

    def forget(self, replica: int) -> None:
        """The replica lost its cache."""
        for block_hash in self._blocks.pop(replica, ()):
            self.holders.remove(block_hash, replica)


class ReportedIndex:
    """What the replicas reported. Blocks count while any cache group holds them."""

    def __init__(self) -> None:
        self.holders = Holders()
        self._groups: dict[int, dict[bytes, set[int]]] = {}

    def apply(self, replica: int, events: Iterable[CacheEvent]) -> bool:
        """Take in a replica's events, oldest first. False: some were lost, and a snapshot has to come (`replace`)."""
        complete = True
        for event in events:
            if isinstance(event, EventsLost):
                complete = False
            elif isinstance(event, BlockStored):
                self._store(replica, event)
            else:
                self._remove(replica, event)
        return complete

    def replace(self, replica: int, snapshot: Iterable[BlockStored]) -> None:
        """Start afresh from a snapshot (`PrefixCache.snapshot`)."""
        self.forget(replica)
        for event in snapshot:
            self._store(replica, event)

    def forget(self, replica: int) -> None:
        """The replica lost its cache."""
        for block_hash in self._groups.pop(replica, {}):
            self.holders.remove(block_hash, replica)

    def _store(self, replica: int, event: BlockStored) -> None:
        self._groups.setdefault(replica, {}).setdefault(event.block_hash, set()).update(event.groups)
        self.holders.add(event.block_hash, replica)

    def _remove(self, replica: int, event: BlockRemoved) -> None:
        blocks = self._groups.get(replica, {})
        groups = blocks.get(event.block_hash)
        if groups is None:
            return
        groups.difference_update(event.groups)
        if not groups:
            del blocks[event.block_hash]
            self.holders.remove(event.block_hash, replica)


class PendingIndex:
    """The chains of requests that are on their way to a replica and have no first token yet."""

    def __init__(self) -> None:
        self.holders = Holders()
        self._counts: Counter[tuple[int, bytes]] = Counter()

    def sent(self, replica: int, chain: Sequence[bytes]) -> None:
        """A request with this chain went to ``replica``."""
        for block_hash in chain:
            self._counts[replica, block_hash] += 1
            self.holders.add(block_hash, replica)

    def arrived(self, replica: int, chain: Sequence[bytes]) -> None:
        """That request has its first token, or is over: from here on the replica's report says what is there."""
        for block_hash in chain:
            self._counts[replica, block_hash] -= 1
            if not self._counts[replica, block_hash]:
                del self._counts[replica, block_hash]
                self.holders.remove(block_hash, replica)
