"""Blocks: their ids (`BlockPool`), the rows of a sequence (`BlockTable`, `Windows`), nodes of the prefix tree (`Node`).

row              0     1     2     3     4
group 0 (full)   7     3     9     5     –        capacity = 4 rows · block_size tokens
group 1 (w)      –     –     4     8     –        first_rows[1] = 2: no query sees rows 0 and 1 any more
                 └─ published ─┘                  num_published = 3: these rows are in the prefix tree
                             └ sent from here     num_sent_rows: the worker has the rows below

position         0 …………………………… p − w + 1 ………… p          w = 40, block size 16, p = 70
row              │ 0 │ 1 │ 2 │ 3 │ 4 │                   a query at 70 sees 31 … 70
needed                   ├───┴───┴───┤                   rows 1 … 4; rows below 1 may go
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field

NO_BLOCK = -1
# Row of a block that has tokens of spans → what their contents add to its hash (`cache.span_content`).
Spans = Mapping[int, bytes] | None


class BlockPool:
    """A pool of ``num_blocks`` block ids of equal size. Taking and dropping are O(1) per block.

    A reference is held by a sequence (its block table), the prefix cache (one), a step or a transfer in flight. A block
    returns to the pool when the last reference goes.

        0 … untouched − 1      handed out before; the free ones are on the stack, last freed on top
        untouched … num − 1    never handed out, so their memory was never touched; taken in ascending order

    Blocks that were used before are handed out first: memory grows only when it must, in order, slab by slab.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.num_untouched = num_blocks
        self.ref_counts = [0] * num_blocks
        self.free_ids: list[int] = []

    @property
    def is_whole(self) -> bool:
        """Whether the stack holds each free block that was used before once."""
        counts, free = self.ref_counts, self.free_ids
        return len(free) == len(set(free)) == self.num_free - self.num_untouched and not any(
            counts[block_id] for block_id in free
        )

    def take(self) -> int:
        """Hand out a free block with one reference. The caller has checked `num_free`."""
        return self.take_many(1)[0]

    def take_many(self, count: int) -> list[int]:
        """`take`, ``count`` times."""
        assert 0 <= count <= self.num_free
        free, counts = self.free_ids, self.ref_counts
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
            self.free_ids.append(block_id)
            self.num_free += 1
        return count

    def drop_all(self, block_ids: Iterable[int]) -> list[int]:
        """`drop` each, in this order; return those that had one reference left then."""
        counts, free = self.ref_counts, self.free_ids
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


@dataclass(slots=True, eq=False, repr=False)
class BlockTable:
    """The blocks of one sequence. Only `CacheManager` changes it."""

    num_groups: InitVar[int]
    root: bytes  # hash that the chain starts from
    block_size: int
    publishes: bool = True
    spans: Spans = None
    # Hashes of the full blocks of the known tokens; they outlive a preemption.
    chain: list[bytes] = field(default_factory=list)
    last_step: int = -1  # the last step that this table took part in
    reads_prefix: bool = True  # whether an admission may take blocks from the prefix tree
    rows: list[list[int]] = field(init=False)  # per group, block id or NO_BLOCK
    first_rows: list[int] = field(init=False)
    num_sent_rows: int = field(init=False)
    num_published: int = field(init=False)
    publishable: bool = field(init=False)
    tip: Node | None = field(init=False)  # node of row num_published − 1
    reads: set[int] = field(init=False)  # steps that were in flight when their blocks were taken over

    def __post_init__(self, num_groups: int) -> None:
        self._empty(num_groups)

    def _empty(self, num_groups: int) -> None:
        self.rows, self.first_rows = [[] for _ in range(num_groups)], [0] * num_groups
        self.num_sent_rows = self.num_published = 0
        self.publishable = self.publishes
        self.tip, self.reads = None, set()

    def clear(self) -> None:
        """Forget the blocks (their references have been given up); the next admission starts from row 0."""
        self._empty(len(self.rows))

    @property
    def num_rows(self) -> int:
        return len(self.rows[0])

    @property
    def num_blocks(self) -> int:
        """Blocks that the table refers to, of all groups."""
        return len(self.rows[0]) * len(self.rows) - sum(self.first_rows)

    @property
    def capacity(self) -> int:
        """Tokens that the rows can hold."""
        return len(self.rows[0]) * self.block_size

    def take_unsent(self) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        """Return ``block_start`` and ``new_block_ids`` of a `SeqPlan`, and count them as sent."""
        if self.num_sent_rows == len(self.rows[0]):
            return (), ()
        starts = tuple([max(self.num_sent_rows, first) for first in self.first_rows])
        ids = tuple([tuple(rows[start:]) for rows, start in zip(self.rows, starts, strict=True)])
        self.num_sent_rows = len(self.rows[0])
        return starts, ids

    def truncate(self, num_rows: int) -> list[int]:
        """Remove the rows from ``num_rows`` on and return their blocks, whose references are the caller's now."""
        assert self.num_published <= num_rows
        removed = [block_id for rows in self.rows for block_id in rows[num_rows:] if block_id != NO_BLOCK]
        for rows in self.rows:
            del rows[num_rows:]
        self.num_sent_rows = min(self.num_sent_rows, num_rows)
        return removed

    def block_ids(self) -> list[int]:
        """Return every block that the table refers to, last rows first (the order in which they should idle)."""
        if len(self.rows) == 1:
            return [block_id for block_id in reversed(self.rows[0]) if block_id != NO_BLOCK]
        return [
            rows[r] for r in range(self.num_rows - 1, -1, -1) for rows in self.rows if rows[r] != NO_BLOCK
        ]


class Windows:
    """The keep rule of each group: None keeps every row, ``w`` those of the last w positions."""

    def __init__(self, windows: tuple[int | None, ...], block_size: int) -> None:
        assert windows
        assert all(w is None or w > 0 for w in windows)
        self.windows = windows
        self.num_groups = len(windows)
        self.sliding = tuple(g for g, w in enumerate(windows) if w is not None)
        self.num_full = len(windows) - len(self.sliding)
        self._block_size = block_size

    def first_rows(self, position: int) -> tuple[int, ...]:
        """Return per group the first row that a query at ``position``, or a later one, can see."""
        return tuple(0 if w is None else max(0, position - w + 1) // self._block_size for w in self.windows)

    def next_slide(self, first_rows: Sequence[int]) -> int:
        """Return the position from which a query sees less than the rows from ``first_rows`` on."""
        return min((first_rows[g] + 1) * self._block_size + (self.windows[g] or 0) - 1 for g in self.sliding)

    def usable(self, nodes: Sequence[Node], num_rows: int, num_known: int) -> tuple[int, tuple[int, ...]]:
        """Return the most rows ≤ ``num_rows`` that can be hit, and the first row needed of each group.

        Every row of the full groups is in ``nodes``; of a sliding group the rows that the next query sees must be.
        """
        runs = {g: _runs(nodes, g) for g in self.sliding}
        for rows in range(num_rows, 0, -1):
            first_rows = self.first_rows(min(rows * self._block_size, num_known - 1))
            if all(runs[g][rows - 1] >= rows - first_rows[g] for g in self.sliding):
                return rows, first_rows
        return 0, (0,) * self.num_groups

    def lifetime_blocks(self, num_tokens: int, chunk: int) -> int:
        """Return the blocks that a sequence alone needs at most to compute ``num_tokens`` in chunks of ``chunk``."""
        rows = -(-num_tokens // self._block_size)
        total = self.num_full * rows
        for group in self.sliding:
            window = self.windows[group]
            assert window is not None
            # From the first position that the chunk's first row sees to its last row.
            seen = window + chunk - 1
            total += min(rows, -(-(seen - 1) // self._block_size) + 1)
        return total


def _runs(nodes: Sequence[Node], group: int) -> list[int]:
    """Return for each row how many rows up to it have a block of ``group`` without a gap."""
    runs, run = [], 0
    for node in nodes:
        run = run + 1 if node.block_ids[group] != NO_BLOCK else 0
        runs.append(run)
    return runs


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """One block of tokens after one prefix: a node of `PrefixCache`'s tree."""

    block_hash: bytes
    parent: Node | None
    parent_hash: bytes  # the root's hash where there is no parent
    block_ids: tuple[int, ...]  # per cache group, or NO_BLOCK
    # The step that computes the block; for a prompt block just published, this step is still in flight.
    step: int
    # The nodes whose parent it is are a list linked in both directions, so that a subtree is found without the tree.
    first_child: Node | None = None
    next_sibling: Node | None = None
    prev_sibling: Node | None = None
    num_used: int = 0  # how many of block_ids have a reference beside the tree's
    num_places: int = 0  # in the `IdleQueue`
    alive: bool = True  # in the tree
    token_ids: tuple[int, ...] = ()  # kept only where events are on

    def link(self) -> None:
        """Become the first child of the parent."""
        parent = self.parent
        if parent is not None:
            first = self.next_sibling = parent.first_child
            if first is not None:
                first.prev_sibling = self
            parent.first_child = self

    def unlink(self) -> None:
        """Leave the parent's children."""
        before, behind = self.prev_sibling, self.next_sibling
        if before is not None:
            before.next_sibling = behind
        elif self.parent is not None:
            self.parent.first_child = behind
        if behind is not None:
            behind.prev_sibling = before
        self.prev_sibling = self.next_sibling = None

    def put(self, group: int, block_id: int) -> None:
        """Have ``block_id`` of a cache group, or `NO_BLOCK`."""
        self.block_ids = (*self.block_ids[:group], block_id, *self.block_ids[group + 1 :])

    @property
    def has_blocks(self) -> bool:
        """Whether it has a block of any cache group."""
        return any(block_id != NO_BLOCK for block_id in self.block_ids)

    @property
    def groups(self) -> tuple[int, ...]:
        """The cache groups that this node has a block of."""
        return tuple(g for g, block_id in enumerate(self.block_ids) if block_id != NO_BLOCK)
