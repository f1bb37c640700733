"""`BlockPool`: equal pages by id, an intrusive free list, and one reference count a block.

Who may hold a reference: a sequence (its block table), the prefix cache (one), a step or a move in flight. A block
returns to the pool when the last reference goes.

    0 … untouched − 1      handed out before; the free ones are linked through `_next_free`, last freed first
    untouched … num − 1    never handed out, so their memory was never touched; taken in ascending order

Blocks that were used before are handed out first: memory grows only when it must, in order, slab by slab.
"""

from __future__ import annotations

_END = -1


class BlockPool:
    """A pool of ``num_blocks`` block ids. Taking and dropping are O(1)."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.num_untouched = num_blocks
        self.ref_counts = [0] * num_blocks
        self._next_free = [_END] * num_blocks
        self._head = _END

    def take(self) -> int:
        """Hand out a free block with one reference. The caller has checked `num_free`."""
        assert self.num_free > 0
        block_id = self._head
        if block_id == _END:
            block_id = self.num_blocks - self.num_untouched
            self.num_untouched -= 1
        else:
            self._head = self._next_free[block_id]
            self._next_free[block_id] = _END
        assert self.ref_counts[block_id] == 0
        self.num_free -= 1
        self.ref_counts[block_id] = 1
        return block_id

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
            self._next_free[block_id] = self._head
            self._head = block_id
            self.num_free += 1
        return count

    def free_ids(self) -> list[int]:
        """Return every free id, walking the list: for `check_integrity`."""
        ids = list(range(self.num_blocks - self.num_untouched, self.num_blocks))
        block_id, steps = self._head, 0
        while block_id != _END:
            assert steps <= self.num_blocks, "the free list has a cycle"
            ids.append(block_id)
            block_id, steps = self._next_free[block_id], steps + 1
        return ids
