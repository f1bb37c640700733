"""Which replica holds which prefix, by chain hashes of blocks (`quire.cache.prefix_cache`).

A chain hash identifies all tokens up to the end of its block, so no tree is needed: a replica holds a prefix as far as
it holds consecutive hashes, and one pass over a request's chain gives the depth at every replica.

    PredictedIndex    remembers what was sent where, evicting the least recently used; needs no reports from replicas
    ReportedIndex     keeps what the replicas report in their cache events (`quire.cache.events`)
    PendingIndex      knows the prefixes of requests in flight, until the replica's report has them
    PieceNames        finds the blocks that text has, for chains that are digests of text
    KnownPrefixes     what a routing policy goes by: one or two of the others
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice, takewhile

from quire.cache.events import BlockStored, CacheEvent, EventsLost

TICKS_TO_LIVE = 8


class Holders:
    """Block hash → the set of replicas that hold it, as bits."""

    def __init__(self) -> None:
        self._masks: dict[bytes, int] = {}
        self._ones: dict[
            int, int
        ] = {}  # replica → the mask that most hashes have: one object for all of them

    def __len__(self) -> int:
        return len(self._masks)

    def add(self, block_hash: bytes, replica: int) -> None:
        self.add_all((block_hash,), replica)

    def add_all(self, hashes: Iterable[bytes], replica: int) -> None:
        one, masks = self._ones.setdefault(replica, 1 << replica), self._masks
        get = masks.get
        for block_hash in hashes:
            before = get(block_hash)
            masks[block_hash] = one if before is None else before | one

    def remove(self, block_hash: bytes, replica: int) -> None:
        self.remove_all((block_hash,), replica)

    def remove_all(self, hashes: Iterable[bytes], replica: int) -> None:
        masks, one = self._masks, 1 << replica
        for block_hash in hashes:
            before = masks.get(block_hash, 0)
            if before & ~one:
                masks[block_hash] = before & ~one
            elif before:
                del masks[block_hash]

    def has(self, block_hash: bytes, replica: int) -> bool:
        return bool(self._masks.get(block_hash, 0) >> replica & 1)

    def forget(self, replica: int) -> None:
        """``replica`` holds nothing; looks at every block."""
        for block_hash in [block for block, mask in self._masks.items() if mask >> replica & 1]:
            self.remove(block_hash, replica)

    def depths(self, chain: Sequence[bytes], num_replicas: int) -> list[int]:
        """Return per replica how many of ``chain``'s first blocks it holds without a gap."""
        depths = [0] * num_replicas
        left = (1 << num_replicas) - 1
        get = self._masks.get
        for depth, block_hash in enumerate(chain):
            still = left & get(block_hash, 0)
            if still == left:
                continue
            gone = left ^ still if depth else 0  # a depth of 0 needs no mention
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
    """Remembers which blocks were sent where; assumes that a replica holds the last ``capacity`` of its blocks.

    About 150 bytes per block of 16 bytes: a plain dict in order of use, from which the oldest are deleted several at a
    time, since each look at its front walks over what was deleted there.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity > 0
        self._capacity = capacity
        self._slack = capacity >> 6
        self.holders = Holders()
        self._blocks: dict[
            int, dict[bytes, int]
        ] = {}  # by replica: hash → the tick at which it was last sent
        self._tick = 0

    def sent(self, replica: int, chain: Sequence[bytes]) -> None:
        """A request with this chain went to ``replica``."""
        blocks, tick, new = self._blocks.setdefault(replica, {}), self._tick, list[bytes]()
        for block_hash in reversed(chain):  # the front is touched last: the end of a prefix is evicted first
            if blocks.pop(block_hash, None) is None:
                new.append(block_hash)
            blocks[block_hash] = tick
        self.holders.add_all(new, replica)
        excess = len(blocks) - self._capacity
        if excess > self._slack:
            self._evict(replica, list(islice(blocks, excess)))

    def tick(self) -> None:
        """Time has passed: forget what was not sent again within the last `TICKS_TO_LIVE` calls."""
        self._tick += 1
        oldest = self._tick - TICKS_TO_LIVE
        for replica, blocks in self._blocks.items():
            stale = takewhile(lambda block: block[1] < oldest, blocks.items())
            self._evict(replica, [block_hash for block_hash, _ in stale])

    def _evict(self, replica: int, hashes: Sequence[bytes]) -> None:
        blocks = self._blocks[replica]
        for block_hash in hashes:
            del blocks[block_hash]
        self.holders.remove_all(hashes, replica)

    def forget(self, replica: int) -> None:
        """The replica lost its cache."""
        for block_hash in self._blocks.pop(replica, ()):
            self.holders.remove(block_hash, replica)


class ReportedIndex:
    """Keeps the reports of the replicas. A block counts while any cache group holds it.

    Groups are kept for the blocks alone that others than the first one hold: most models have one group.
    """

    def __init__(self) -> None:
        self.holders = Holders()
        self._groups: dict[
            int, dict[bytes, int]
        ] = {}  # by replica: hash → groups as bits, where they are not just 0

    def apply(self, replica: int, events: Iterable[CacheEvent]) -> bool:
        """Apply a replica's events, oldest first. False: some were lost, and a snapshot is needed (`replace`)."""
        complete = True
        groups = self._groups.setdefault(replica, {})
        for event in events:
            if isinstance(event, EventsLost):
                complete = False
                continue
            block_hash, bits = event.block_hash, sum(1 << group for group in event.groups)
            before = groups.get(block_hash, int(self.holders.has(block_hash, replica)))
            after = before | bits if isinstance(event, BlockStored) else before & ~bits
            if after > 1:
                groups[block_hash] = after
            elif before > 1:
                del groups[block_hash]
            if after and not before:
                self.holders.add(block_hash, replica)
            elif before and not after:
                self.holders.remove(block_hash, replica)
        return complete

    def replace(self, replica: int, snapshot: Iterable[CacheEvent]) -> None:
        """Replace what is known of a replica by a snapshot (`PrefixCache.snapshot`)."""
        self.forget(replica)
        self.apply(replica, snapshot)

    def forget(self, replica: int) -> None:
        """The replica lost its cache."""
        self._groups.pop(replica, None)
        self.holders.forget(replica)


class PieceNames:
    """Digest of a piece of text → the hash of the last whole block inside it, as replicas tell with their answers.

    Pieces that are used again are kept, up to ``capacity``.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def learn(self, chain: Sequence[bytes], hashes: Sequence[bytes]) -> None:
        """``hashes``: of the first pieces of ``chain``; the same object for pieces that end in the same block."""
        blocks = self._blocks
        for piece, block_hash in zip(chain, hashes, strict=False):
            blocks.pop(piece, None)
            blocks[piece] = block_hash
        excess = len(blocks) - self._capacity
        if excess > self._capacity >> 6:
            for piece in list(islice(blocks, excess)):
                del blocks[piece]

    def of(self, chain: Sequence[bytes]) -> list[bytes]:
        """Return the blocks of the first pieces, up to one that is not known."""
        blocks: list[bytes] = []
        get, add = self._blocks.get, blocks.append
        for piece in chain:
            block_hash = get(piece)
            if block_hash is None:
                break
            add(block_hash)
        return blocks


class PendingIndex:
    """The chains of requests that were sent to a replica and have no first token yet."""

    def __init__(self) -> None:
        self.holders = Holders()
        self._counts: dict[int, dict[bytes, int]] = {}  # by replica: hash → requests

    def sent(self, replica: int, chain: Sequence[bytes]) -> None:
        """A request with this chain went to ``replica``."""
        counts = self._counts.setdefault(replica, {})
        get = counts.get
        for block_hash in chain:
            counts[block_hash] = get(block_hash, 0) + 1
        self.holders.add_all(chain, replica)

    def arrived(self, replica: int, chain: Sequence[bytes]) -> None:
        """That request has its first token, or has ended: from now on the replica's report counts."""
        counts = self._counts[replica] if chain else {}
        for block_hash in chain:
            left = counts[block_hash] - 1
            if left:
                counts[block_hash] = left
            else:
                del counts[block_hash]
                self.holders.remove(block_hash, replica)


class KnownPrefixes:
    """What is known of the replicas' caches under a policy: predicted, reported, or both (hybrid), or nothing."""

    ticks_to_live = TICKS_TO_LIVE

    def __init__(self, policy: str, capacity: int, *, of_text: bool = False) -> None:
        """``of_text``: chains are digests of text, whose blocks are to be learned; else hashes of blocks."""
        self._is_predicted = policy == "prefix-predicted"
        self.names = PieceNames(capacity) if of_text else None
        self._is_hybrid = policy == "prefix-hybrid"
        self._predicted = PredictedIndex(capacity)
        self._reported = ReportedIndex()
        self._pending = PendingIndex()
        self.tick = self._predicted.tick  # an eighth of the time that a predicted block lives has passed
        # A replica's cache events. False: some were lost; pass a snapshot to `replace_report`.
        self.report = self._reported.apply
        self.replace_report = self._reported.replace
        self.forget_report = self._reported.forget

    def depths(self, chain: Sequence[bytes], num_replicas: int) -> list[int]:
        """Return per replica how many of ``chain``'s first blocks it holds."""
        if self._is_predicted:
            return self._predicted.holders.depths(chain, num_replicas)
        blocks = self.names.of(chain) if self.names is not None else chain
        reported = self._reported.holders.depths(blocks, num_replicas)
        if not self._is_hybrid:
            return reported
        return list(map(max, reported, self._pending.holders.depths(chain, num_replicas)))

    def sent(self, replica: int, chain: Sequence[bytes]) -> None:
        """A request with this chain went to ``replica``."""
        if self._is_predicted:
            self._predicted.sent(replica, chain)
        elif self._is_hybrid:
            self._pending.sent(replica, chain)

    def arrived(self, replica: int, chain: Sequence[bytes]) -> None:
        """That request has its first token, or has ended."""
        if self._is_hybrid:
            self._pending.arrived(replica, chain)

    def forget(self, replica: int) -> None:
        """The replica lost its cache."""
        self._predicted.forget(replica)
        self._reported.forget(replica)
