"""Sequence state of a worker, and `StepPlan` → the tensors of a step.

State lies in numpy arrays with one row a sequence, kept between steps; a step gathers from them with index
arithmetic, so nothing here loops over tokens. Rows are taken at admission and given back when a sequence goes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire.errors import StepError
from quire.kernels.attention import RaggedBatch
from quire.layers.step_batch import GroupBatch, StepBatch
from quire.step import NewSeq, SeqPlan

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """What the model runs on, and which of the plan's sequences (by index) sample, in the order of the logits."""

    batch: StepBatch
    sampling: tuple[int, ...]


class InputBatch:
    """Ids and block tables of the worker's sequences."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, num_groups: int) -> None:
        self._block_size = block_size
        self._max_blocks = -(-max_model_len // block_size) + 1
        self._max_tokens = self._max_blocks * block_size
        # np.zeros maps untouched memory: rows and columns that are never used cost nothing.
        self._token_ids = np.zeros((max_num_seqs, self._max_tokens), np.int32)
        self._num_tokens = np.zeros(max_num_seqs, np.int64)
        self._tables = [np.zeros((max_num_seqs, self._max_blocks), np.int32) for _ in range(num_groups)]
        self._rows: dict[int, int] = {}
        self._epochs: dict[int, int] = {}
        self._free = list(range(max_num_seqs))[::-1]

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, new: NewSeq) -> None:
        """Take a sequence, or the next epoch of one that is here."""
        known = len(new.prompt_token_ids) + len(new.output_token_ids)
        assert known <= self._max_tokens, (
            f"sequence {new.seq_id} has {known} tokens, room for {self._max_tokens}"
        )
        row = self._rows.get(new.seq_id)
        if row is None:
            if not self._free:
                self._grow()
            row = self._free.pop()
            self._rows[new.seq_id] = row
        self._epochs[new.seq_id] = new.epoch
        ids = self._token_ids[row]
        ids[: len(new.prompt_token_ids)] = new.prompt_token_ids
        ids[len(new.prompt_token_ids) : known] = new.output_token_ids
        self._num_tokens[row] = known
        for table in self._tables:
            table[row] = 0

    def remove(self, seq_id: int) -> None:
        """Drop a sequence; one that is not here (gone before its first step) is no error."""
        row = self._rows.pop(seq_id, None)
        self._epochs.pop(seq_id, None)
        if row is not None:
            self._free.append(row)

    def append(self, seq_id: int, token_id: int) -> None:
        """Add a sampled token to the known ids."""
        row = self._rows[seq_id]
        if self._num_tokens[row] < self._max_tokens:  # beyond it the scheduler ends the sequence
            self._token_ids[row, self._num_tokens[row]] = token_id
            self._num_tokens[row] += 1

    def update_tables(self, plans: tuple[SeqPlan, ...]) -> list[int]:
        """Write the new blocks; return those that hold nothing yet (they start at or after the first new row)."""
        fresh: list[int] = []
        for plan in plans:
            if not plan.new_block_ids:
                continue
            row = self._rows[plan.seq_id]
            first_empty = -(-plan.num_computed_tokens // self._block_size)
            for table, start, ids in zip(self._tables, plan.block_start, plan.new_block_ids, strict=True):
                if ids:
                    table[row, start : start + len(ids)] = np.maximum(
                        ids, 0
                    )  # a row without a block is never read
                    fresh.extend(block for block in ids[max(0, first_empty - start) :] if block >= 0)
        return fresh

    def prepare(self, plans: tuple[SeqPlan, ...]) -> PreparedStep:
        """Return the tensors of the step; rows are in the order of ``plans``, positions ascending in each."""
        self._check(plans)
        rows = np.array([self._rows[plan.seq_id] for plan in plans], np.int64)
        computed = np.array([plan.num_computed_tokens for plan in plans], np.int64)
        lengths = np.array([plan.num_scheduled_tokens for plan in plans], np.int64)
        cu_seqlens_q = np.zeros(len(plans) + 1, np.int64)
        np.cumsum(lengths, out=cu_seqlens_q[1:])
        seq_lens = computed + lengths
        owner = np.repeat(np.arange(len(plans)), lengths)  # [num_tokens]
        positions = np.arange(cu_seqlens_q[-1]) + (computed - cu_seqlens_q[:-1])[owner]
        token_rows = rows[owner]
        sampling = np.flatnonzero(seq_lens == self._num_tokens[rows])
        width = int(-(-seq_lens.max(initial=1) // self._block_size))
        columns, offsets = np.divmod(positions, self._block_size)
        slot_offsets = torch.from_numpy(offsets)
        groups = tuple(
            GroupBatch(
                slot_blocks=torch.from_numpy(table[token_rows, columns].astype(np.int64)),
                slot_offsets=slot_offsets,
                ragged=RaggedBatch(cu_seqlens_q, seq_lens, table[rows, :width].astype(np.int64)),
            )
            for table in self._tables
        )
        batch = StepBatch(
            input_ids=torch.from_numpy(self._token_ids[token_rows, positions].astype(np.int64)),
            positions=torch.from_numpy(positions),
            logits_indices=torch.from_numpy(cu_seqlens_q[1:][sampling] - 1),
            groups=groups,
        )
        return PreparedStep(batch, tuple(sampling.tolist()))

    def _check(self, plans: tuple[SeqPlan, ...]) -> None:
        for plan in plans:
            row = self._rows.get(plan.seq_id)
            if row is None or self._epochs[plan.seq_id] != plan.epoch:
                raise StepError(
                    f"The plan names sequence {plan.seq_id} in epoch {plan.epoch}; the worker has "
                    f"{'it not' if row is None else f'epoch {self._epochs[plan.seq_id]}'}."
                )
            if plan.num_draft_tokens or plan.max_next_drafts:
                raise StepError(
                    f"Sequence {plan.seq_id}: this worker has no drafts, and the plan asks for some."
                )
            if plan.forced_token_ids:
                self._force(row, plan.forced_token_ids)
            known = int(self._num_tokens[row])
            if not 0 < plan.num_scheduled_tokens <= known - plan.num_computed_tokens:
                raise StepError(
                    f"Sequence {plan.seq_id}: rows {plan.num_computed_tokens} + {plan.num_scheduled_tokens} are "
                    f"planned, and {known} tokens are known."
                )

    def _force(self, row: int, forced: tuple[int, ...]) -> None:
        """Overwrite the last known ids (beams)."""
        known = int(self._num_tokens[row])
        self._token_ids[row, known - len(forced) : known] = forced

    def _grow(self) -> None:
        """Double the rows: a plan may hold finished sequences beside their successors for one step."""
        size = len(self._num_tokens)
        self._token_ids = np.concatenate((self._token_ids, np.zeros_like(self._token_ids)))
        self._num_tokens = np.concatenate((self._num_tokens, np.zeros_like(self._num_tokens)))
        self._tables = [np.concatenate((table, np.zeros_like(table))) for table in self._tables]
        self._free = list(range(size, 2 * size))[::-1]
