"""Branches: the paths of a tree of drafts beside its trunk, each computed as a sequence of its own.

    position   … L−1   L = last known   L+1   L+2   L+3
    trunk              row              d1    d2    d3       in the sequence's own blocks
    branch             row again        d1'   e2    e3       in blocks of its own from that of e2 on

So attention reads K and V of a draft's ancestors in the order of their positions, through a block table, with the
kernels of a chain and therefore with its bits. The first block of a branch begins as a copy, for what it holds of
tokens before L. The rows between that block's beginning, or L, and the fork are computed again (d1'). Where a branch is
accepted, its blocks are copied over the sequence's own before the result of the step is known to the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.sampling.draft_tree import Drafts

Tables = Sequence[npt.NDArray[np.int32]]  # per cache group: the block table of one sequence
Move = tuple[int, int]  # copy a block: (source, target)


@dataclass(frozen=True, slots=True)
class Branch:
    """A path of drafts from the root to a leaf, of which only the last ones, ``nodes``, belong to no earlier path."""

    path: tuple[int, ...]
    nodes: tuple[int, ...]
    last_known: int  # position
    start: int  # position of its first row
    block_size: int
    first_block: int  # index in the block table, from which the blocks are its own
    blocks: tuple[tuple[int, ...], ...]  # per cache group
    replaced: tuple[tuple[int, ...], ...]  # the sequence's own blocks at their places

    @property
    def num_rows(self) -> int:
        return self.last_known + len(self.path) + 1 - self.start

    def moves(self, count: int) -> list[Move]:
        """Return the moves that make the first ``count`` drafts of the path part of the sequence."""
        num = (self.last_known + count) // self.block_size + 1 - self.first_block
        pairs = zip(self.blocks, self.replaced, strict=True)
        return [move for sources, targets in pairs for move in zip(sources[:num], targets[:num], strict=True)]


class BranchBlocks:
    """Blocks beyond those of the scheduler, which branches have for one step."""

    def __init__(self, first: int, count: int, block_size: int) -> None:
        self._blocks = range(first, first + count)
        self._block_size = block_size
        self._num_used = 0

    def begin_step(self) -> None:
        self._num_used = 0

    def place(self, drafts: Drafts, num_known: int, tables: Tables) -> tuple[list[Branch], list[Move]] | None:
        """Return the branches of ``drafts`` behind ``num_known`` tokens, and what to copy; None: too few blocks."""
        trunk, *others = drafts.paths()
        last, size = num_known - 1, self._block_size
        branches: list[Branch] = []
        moves: list[Move] = []
        for nodes in others:
            path = drafts.path(nodes[-1])
            common = sum(1 for node, other in zip(path, trunk, strict=False) if node == other)
            fork = last + common + 1  # the first position that differs from the trunk's
            first, end = fork // size, (last + len(path)) // size + 1
            blocks = [self._take(end - first) for _ in tables]
            if not all(blocks):
                return None
            replaced = [tuple(table[first:end].tolist()) for table in tables]
            if first * size < last:
                moves += [(own[0], taken[0]) for own, taken in zip(replaced, blocks, strict=True)]
            start = min(max(last, first * size), fork)
            branches.append(
                Branch(tuple(path), tuple(nodes), last, start, size, first, tuple(blocks), tuple(replaced))
            )
        return branches, moves

    @property
    def used(self) -> Sequence[int]:
        """The blocks taken in this step."""
        return self._blocks[: self._num_used]

    def _take(self, count: int) -> tuple[int, ...]:
        if self._num_used + count > len(self._blocks):
            return ()
        taken = self._blocks[self._num_used : self._num_used + count]
        self._num_used += count
        return tuple(taken)
