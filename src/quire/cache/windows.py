"""`Windows`: which rows of a block table a query can still see, per cache group.

position      0 …………………………… p − w + 1 ………… p          w = 40, block size 16, p = 70
row           │ 0 │ 1 │ 2 │ 3 │ 4 │                   a query at 70 sees 31 … 70
needed                ├───┴───┴───┤                   rows 1 … 4; rows below 1 may go
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.cache.node import NO_BLOCK, Node


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
            seen = (
                window + chunk - 1
            )  # from the first position that the chunk's first row sees to its last row
            total += min(rows, -(-(seen - 1) // self._block_size) + 1)
        return total


def _runs(nodes: Sequence[Node], group: int) -> list[int]:
    """Return for each row how many rows up to it have a block of ``group`` without a gap."""
    runs, run = [], 0
    for node in nodes:
        run = run + 1 if node.block_ids[group] != NO_BLOCK else 0
        runs.append(run)
    return runs
