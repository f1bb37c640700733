"""`BlockTable`: which blocks one sequence holds, and how much of that its worker knows.

row              0     1     2     3     4
group 0 (full)   7     3     9     5     –        capacity = 4 rows · block_size tokens
group 1 (w)      –     –     4     8     –        first_rows[1] = 2: rows 0, 1 can be seen by no query any more
                 └─ published ─┘                  num_published = 3: these rows are in the prefix tree
                             └ sent from here     sent_rows: the worker has the rows below
"""

from __future__ import annotations

from quire.cache.node import NO_BLOCK, Node

NEVER = 1 << 62
_NOTHING: tuple[tuple[int, ...], tuple[tuple[int, ...], ...]] = ((), ())


class BlockTable:
    """The blocks of one sequence. Only `CacheManager` changes it."""

    __slots__ = (
        "_publishes",
        "capacity",
        "chain",
        "due_at",
        "first_rows",
        "last_step",
        "num_published",
        "publishable",
        "reads",
        "reads_prefix",
        "root",
        "rows",
        "sent_rows",
        "slide_at",
        "tip",
        "unsent",
    )

    def __init__(self, num_groups: int, root: bytes, *, publishes: bool = True) -> None:
        self.root = root  # hash that the chain starts from
        self.chain: list[
            bytes
        ] = []  # hashes of the full blocks of the known tokens; they outlive a preemption
        self.last_step = -1  # the last step that this table took part in
        self._publishes = publishes
        self.reads_prefix = True  # whether an admission may take blocks from the prefix tree
        self._empty(num_groups)

    def _empty(self, num_groups: int) -> None:
        self.rows: list[list[int]] = [[] for _ in range(num_groups)]  # per group, block id or NO_BLOCK
        self.first_rows = [0] * num_groups
        self.sent_rows = [0] * num_groups
        self.unsent = False
        self.capacity = 0  # tokens that the rows can hold
        self.slide_at = NEVER  # the token count at which a row of a sliding group can go
        self.due_at = NEVER  # the token count at which a row can be published or go
        self.num_published = 0
        self.publishable = self._publishes
        self.tip: Node | None = None  # node of row num_published − 1
        self.reads: set[int] = set()  # steps that were in flight when their blocks were taken over

    def clear(self) -> None:
        """Forget the blocks (their references have been given up); the next admission starts from row 0."""
        self._empty(len(self.rows))

    @property
    def num_rows(self) -> int:
        return len(self.rows[0])

    def take_unsent(self) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        """Return ``block_start`` and ``new_block_ids`` of a `SeqPlan`, and count them as sent."""
        if not self.unsent:
            return _NOTHING
        starts = tuple(map(max, self.sent_rows, self.first_rows))
        ids = tuple([tuple(rows[start:]) for rows, start in zip(self.rows, starts, strict=True)])
        self.sent_rows = [len(rows) for rows in self.rows]
        self.unsent = False
        return starts, ids

    def block_ids(self) -> list[int]:
        """Return every block that the table refers to, last rows first (the order in which they should idle)."""
        if len(self.rows) == 1:
            return [block_id for block_id in reversed(self.rows[0]) if block_id != NO_BLOCK]
        return [
            rows[r] for r in range(self.num_rows - 1, -1, -1) for rows in self.rows if rows[r] != NO_BLOCK
        ]
