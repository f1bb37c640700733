"""`DraftState`: the drafts of one sequence, from their proposal to their acceptance.

propose     drafts: for the next step
take        verifying: those that its plan has, behind the known tokens
place       branches: the paths of a tree next to its trunk, each a sequence more in the step
accept      the path that the target samples as well; its tokens stay, the others go
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quire.errors import StepError
from quire.runner.branches import Branch, BranchBlocks, Move
from quire.sampling.draft_tree import NO_DRAFTS, Drafts
from quire.sampling.seq_state import SeqState
from quire.step import SeqPlan


class Table(Protocol):
    """What is read and written of `WorkerSeqs`: a row per sequence."""

    max_tokens: int
    token_ids: npt.NDArray[np.int32]
    num_tokens: npt.NDArray[np.int64]
    num_settled: npt.NDArray[np.int64]
    block_tables: list[npt.NDArray[np.int32]]
    moves: list[Move]


class DraftState(SeqState):
    """The drafts of the sequence in a row of ``table``."""

    def __init__(self, table: Table, seq_id: int, row: int) -> None:
        self._table, self._seq_id, self._row = table, seq_id, row
        self.drafts: Drafts = NO_DRAFTS  # proposed for the next step
        self.verifying: Drafts = NO_DRAFTS
        self.branches: tuple[Branch, ...] = ()
        self.num_beside = 0  # drafts planned that are not in the trunk
        # Of the last verification: the drafts that were accepted, and what each row sampled.
        self.accepted: tuple[int, ...] = ()
        self.sampled: tuple[int, ...] = ()
        # The distributions that ``drafts`` were sampled from; empty: not kept.
        self.probs: list[Tensor] = []
        # What the proposer remembers; None: it has not seen the sequence.
        self.remembered: Any = None
        # Leading tokens that have K and V of the draft model, as far as it has looked.
        self.num_filled = 0

    def propose(self, token_ids: tuple[int, ...], parents: tuple[int, ...]) -> None:
        """Take the drafts that another rank proposes for the next step."""
        self.drafts = Drafts(token_ids, parents)

    def take(self, plan: SeqPlan) -> None:
        """Put the drafts that ``plan`` verifies behind the known tokens."""
        table, row = self._table, self._row
        known, count = int(table.num_tokens[row]), plan.num_draft_tokens
        end = plan.num_computed_tokens + plan.num_scheduled_tokens
        if count > len(self.drafts) or end != known + count or end > table.max_tokens:
            raise StepError(
                f"Sequence {self._seq_id}: the plan verifies {count} drafts up to token {end}; the worker has "
                f"{len(self.drafts)} drafts after {known} tokens."
            )
        self.verifying = self.drafts.first(count)
        trunk = self.verifying.trunk()
        self.num_beside = count - len(trunk)
        table.token_ids[row, known : known + len(trunk)] = trunk.token_ids
        table.num_tokens[row] = known + len(trunk)

    def place(self, free: BranchBlocks) -> list[Move]:
        """Give the branches of a tree their blocks; return what to copy. Where there are too few, the trunk is left."""
        if not self.num_beside:
            return []
        table, row = self._table, self._row
        tables = [blocks[row] for blocks in table.block_tables]
        placed = free.place(self.verifying, int(table.num_settled[row]), tables)
        if placed is not None:
            self.branches = tuple(placed[0])
            return placed[1]
        trunk = self.verifying.paths()[0]
        self.verifying = self.verifying.trunk()
        self.probs = [self.probs[node] for node in trunk] if self.probs else []
        return []

    def accept(self, path: Sequence[int]) -> None:
        """Keep the drafts on ``path`` (from the root) as the last tokens, and none of the others."""
        table, row = self._table, self._row
        known, end = table.num_settled[row], table.num_settled[row] + len(path)
        table.token_ids[row, known:end] = [self.verifying.token_ids[node] for node in path]
        table.num_tokens[row] = end
        for branch in self.branches:
            if path and path[-1] in branch.nodes:
                table.moves += branch.moves(len(path))
        self.accepted = tuple(path)
        self.forget()

    def forget(self) -> None:
        """Nothing is verified any more."""
        self.verifying, self.branches, self.num_beside = NO_DRAFTS, (), 0
