"""`BlockPool`: block ids of equal size, a stack of free ones, and one reference count per block.

A reference is held by a sequence (its block table), the prefix cache (one), a step or a transfer in flight. A block
returns to the pool when the last reference goes.

    0 … untouched − 1      handed out before; the free ones are on the stack, last freed on top
    untouched … num − 1    never handed out, so their memory was never touched; taken in ascending order

Blocks that were used before are handed out first: memory grows only when it must, in order, slab by slab.
"""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """A pool of ``num_blocks`` block ids. Taking and dropping are O(1) per block."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.num_untouched = num_blocks
        self.ref_counts = [0] * num_blocks
        self._free: list[int] = []

    @property
    def is_whole(self) -> bool:
        """Whether the stack holds each free block that was used before once."""
        counts, free = self.ref_counts, self._free
        return len(free) == len(set(free)) == self.num_free - self.num_untouched and not any(
            counts[block_id] for block_id in free
        )

    def take(self) -> int:
        """Hand out a free block with one reference. The caller has checked `num_free`."""
        return self.take_many(1)[0]

    def take_many(self, count: int) -> list[int]:
        """`take`, ``count`` times."""
        assert 0 <= count <= self.num_free
        free, counts = self._free, self.ref_counts
        ids = free[: -count - 1 : -1]
        del free[len(free) - len(ids) :]
        if len(ids) < count:
            first = self.num_blocks - self.num_untouched
            self.num_untouched -= count - len(ids)
            ids.extend(range(first, self.num_blocks - self.num_untouched))
        self.num_free -= count
        for block_id in ids:
            assert counts[block_id] == 0
            counts[block_id] = 1
        return ids

    def share(self, block_id: int) -> int:
        """Add a reference to a block in use; return how many it has now."""
        count = self.ref_counts[block_id] + 1
        assert count > 1
        self.ref_counts[block_id] = count
        return count

    def drop(self, block_id: int) -> int:
        """Give up a reference; return how many are left. At none the block is free."""
        count = self.ref_counts[block_id] - 1
        assert count >= 0
        self.ref_counts[block_id] = count
        if count == 0:
            self._free.append(block_id)
            self.num_free += 1
        return count

    def drop_all(self, block_ids: Iterable[int]) -> list[int]:
        """`drop` each, in this order; return those that had one reference left then."""
        counts, free = self.ref_counts, self._free
        num_free = len(free)
        last = []
        for block_id in block_ids:
            count = counts[block_id] - 1
            assert count >= 0
            counts[block_id] = count
            if count == 1:
                last.append(block_id)
            elif count == 0:
                free.append(block_id)
        self.num_free += len(free) - num_free
        return last
