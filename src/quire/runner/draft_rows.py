"""`DraftRows`: the rows of drafts in one step, those of the branches of trees included."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.runner.branches import Branch
from quire.runner.draft_state import DraftState
from quire.runner.input_batch import IntArray, StepBuffers
from quire.runner.sequences import WorkerSeq


class DraftRows:
    """The rows of drafts in one step over ``seqs``, those of branches included."""

    def __init__(self, seqs: Sequence[WorkerSeq]) -> None:
        self._seqs = seqs
        # Drafts of each sequence that are not in its own tokens of the step.
        self.num_beside = np.array([0 if seq.drafting is None else seq.drafting.num_beside for seq in seqs])
        self._samplers: Sequence[WorkerSeq] = ()
        self.branches: list[tuple[WorkerSeq, DraftState, Branch]] = []
        self._num_logits: IntArray = np.zeros(0, np.int64)

    def of_samplers(self, samplers: Sequence[WorkerSeq]) -> int:
        """Note which sequences sample; return how many rows of logits they have."""
        self._samplers = samplers
        self._num_logits = np.array([seq.num_logits for seq in samplers], np.int64)
        self.branches = [
            (seq, state, branch)
            for seq in samplers
            if (state := seq.drafting) is not None
            for branch in state.branches
        ]
        return int(self._num_logits.sum())

    def with_branches(self, rows: IntArray, computed: IntArray, lengths: IntArray) -> IntArray:
        """Return the three with an entry more for each branch."""
        if not self.branches:
            return np.array((rows, computed, lengths))
        more = np.array([(seq.row, branch.start, branch.num_rows) for seq, _, branch in self.branches])
        return np.concatenate((np.array((rows, computed, lengths)), more.T), axis=1)

    def branch_out(self, to: StepBuffers, cu_seqlens_q: IntArray, block_size: int) -> None:
        """Give branches their own tokens and blocks; their sequences are the last of the step."""
        first = len(cu_seqlens_q) - 1 - len(self.branches)
        for place, (_, state, branch) in enumerate(self.branches, first):
            start, end = int(cu_seqlens_q[place]), int(cu_seqlens_q[place + 1])
            own = max(0, branch.last_known + 1 - branch.start)  # rows before the first draft
            depth = branch.start + own - branch.last_known - 1
            ids = [state.verifying.token_ids[node] for node in branch.path[depth:]]
            to.input_ids[start + own : end] = ids
            in_table = to.positions[start:end] // block_size - branch.first_block
            here = in_table >= 0
            for slot_blocks, table, blocks in zip(
                to.slot_blocks, to.block_tables, branch.blocks, strict=True
            ):
                slot_blocks[start:end][here] = np.array(blocks)[in_table[here]]
                table[place, branch.first_block : branch.first_block + len(blocks)] = blocks

    def index(self, ends: IntArray, rows: IntArray, branch_ends: IntArray) -> tuple[IntArray, IntArray]:
        """Return the token of each row of logits, and its row of `WorkerSeqs`.

        ``ends``: of the tokens of the sequences that sample, whose rows are ``rows``; ``branch_ends [1 +
        num_branches]``: where the first branch begins, and the ends.
        """
        before = np.cumsum(self._num_logits)
        # The last 1 + num_drafts tokens of each sequence.
        indices = np.repeat(ends - before, self._num_logits) + np.arange(before[-1])
        if self.branches:
            self._index_trees(indices, ends, before, branch_ends)
        return indices, np.repeat(rows, self._num_logits)

    def _index_trees(
        self, indices: IntArray, ends: IntArray, before: IntArray, branch_ends: IntArray
    ) -> None:
        """Point the logits rows of trees at their tokens: the last known one, then drafts in the order of the tree."""
        place = 1
        for seq, end, stop in zip(self._samplers, ends.tolist(), before.tolist(), strict=True):
            state = seq.drafting
            if state is None or not state.branches:
                continue
            trunk, *_ = state.verifying.paths()
            own = indices[stop - 1 - len(state.verifying) : stop]
            own[0] = end - 1 - len(trunk)
            own[1 + np.array(trunk)] = np.arange(end - len(trunk), end)
            for branch in state.branches:
                last = int(branch_ends[place])
                own[1 + np.array(branch.nodes)] = np.arange(last - len(branch.nodes), last)
                place += 1
