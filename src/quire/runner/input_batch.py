"""Sequence state of a worker, and `StepPlan` → the tensors of a step.

State lies in numpy arrays with one row a sequence, kept between steps; a step gathers from them with index
arithmetic, so nothing here loops over tokens. Rows are taken at admission and given back when a sequence goes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.errors import StepError
from quire.layers.step_batch import AdapterBatch, StepBatch
from quire.runner.step_buffers import StepBuffers
from quire.step import NewSeq, SeqPlan


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step in ``buffers``: the tensors the model runs on, and which of the plan's sequences (by index) sample.

    The sampling sequences are in the order of the logits.
    """

    buffers: StepBuffers
    num_tokens: int
    num_seqs: int
    sampling: tuple[int, ...]
    sampling_rows: npt.NDArray[np.int64]  # of `InputBatch`, in the same order
    num_positions: int  # all positions of the step are below it

    @property
    def adapters(self) -> AdapterBatch | None:
        """Which rows have which adapter; None where none has."""
        of = self.buffers.adapters
        return of if of is not None and of.tokens.starts[-1] else None

    @property
    def batch(self) -> StepBatch:
        """Views of the buffers, made anew."""
        return self.buffers.batch(self.num_tokens, self.num_seqs, len(self.sampling))


class InputBatch:
    """Ids and block tables of the worker's sequences.

    Steps of up to ``max_num_batched_tokens`` tokens share `buffers`; a larger one gets its own.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_groups: int,
        max_num_batched_tokens: int = 1,
        max_loras: int = 0,
    ) -> None:
        self._block_size = block_size
        self._max_blocks = -(-max_model_len // block_size) + 1
        # A step's tokens and its logits rows must differ in number where it is recorded (`kernels.tape`).
        max_seqs = min(max_num_seqs, max_num_batched_tokens)
        max_tokens = max(max_num_batched_tokens, max_seqs + 1)
        self._max_loras = max_loras
        self.buffers = StepBuffers(max_tokens, max_seqs, self._max_blocks, num_groups, max_loras)
        self._max_tokens = self._max_blocks * block_size
        # np.zeros maps untouched memory: rows and columns that are never used cost nothing.
        self._token_ids = np.zeros((max_num_seqs, self._max_tokens), np.int32)
        self._num_tokens = np.zeros(max_num_seqs, np.int64)
        self._num_settled = np.zeros(
            max_num_seqs, np.int64
        )  # the tokens that are known here; the rest are `expect`ed
        self._draws = np.zeros(max_num_seqs, np.bool_)  # whether the last known token's row samples
        self._slots = np.zeros(max_num_seqs, np.int64)  # of adapters; 0: the base model
        self._tables = [np.zeros((max_num_seqs, self._max_blocks), np.int32) for _ in range(num_groups)]
        self._rows: dict[int, int] = {}
        self._epochs: dict[int, int] = {}
        self._free = list(range(max_num_seqs))[::-1]

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._rows

    def has(self, seq_id: int, epoch: int) -> bool:
        """Whether the sequence is here, in that epoch."""
        return self._epochs.get(seq_id) == epoch

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
        self._num_tokens[row] = self._num_settled[row] = known
        self._draws[row] = not new.prompt_only
        self._slots[row] = new.adapter_slot
        for table in self._tables:
            table[row] = 0

    def remove(self, seq_id: int) -> None:
        """Drop a sequence; one that is not here (gone before its first step) is no error."""
        row = self._rows.pop(seq_id, None)
        self._epochs.pop(seq_id, None)
        if row is not None:
            self._free.append(row)

    def expect(self, seq_id: int) -> None:
        """Count a token that is being drawn. Until it is settled its id is −(row + 1), and a GPU knows the true one."""
        row = self._rows[seq_id]
        if self._num_tokens[row] < self._max_tokens:  # beyond it the scheduler ends the sequence
            self._token_ids[row, self._num_tokens[row]] = -row - 1
            self._num_tokens[row] += 1

    def settle(self, seq_id: int, epoch: int, token_id: int) -> None:
        """Put in the oldest expected token of a sequence; one that has gone, or come back since, is left alone."""
        row = self._rows.get(seq_id)
        if row is None or self._epochs[seq_id] != epoch or self._num_settled[row] == self._num_tokens[row]:
            return
        self._token_ids[row, self._num_settled[row]] = token_id
        self._num_settled[row] += 1

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
        """Write the step into buffers; rows are in the order of ``plans``, positions ascending in each.

        Raises `StepError` where a plan does not fit what is known here.
        """
        rows = np.array(self._check(plans), np.int64)
        computed = np.array([plan.num_computed_tokens for plan in plans], np.int64)
        lengths = np.array([plan.num_scheduled_tokens for plan in plans], np.int64)
        num_tokens, num_seqs = int(lengths.sum()), len(plans)
        to = self.buffers
        if not to.fits(num_tokens, num_seqs):
            to = StepBuffers(num_tokens, num_seqs, self._max_blocks, len(self._tables), self._max_loras)
        cu_seqlens_q, seq_lens = to.cu_seqlens_q[: num_seqs + 1], to.seq_lens[:num_seqs]
        np.cumsum(lengths, out=cu_seqlens_q[1:])
        np.add(computed, lengths, out=seq_lens)
        if num_tokens == num_seqs:  # one row each
            positions, token_rows = computed, rows
        else:
            owner = np.repeat(np.arange(num_seqs), lengths)  # [num_tokens]
            positions = np.arange(num_tokens) + (computed - cu_seqlens_q[:-1])[owner]
            token_rows = rows[owner]
        to.positions[:num_tokens] = positions
        to.input_ids[:num_tokens] = self._token_ids[token_rows, positions]
        columns = positions // self._block_size
        np.subtract(positions, columns * self._block_size, out=to.slot_offsets[:num_tokens])
        longest = int(seq_lens.max(initial=1))
        width = -(-longest // self._block_size)
        for table, slot_blocks, block_table in zip(
            self._tables, to.slot_blocks, to.block_tables, strict=True
        ):
            slot_blocks[:num_tokens] = table[token_rows, columns]
            block_table[:num_seqs, :width] = table[rows, :width]
        sampling = np.flatnonzero((seq_lens == self._num_tokens[rows]) & self._draws[rows])
        to.logits_indices[: sampling.size] = cu_seqlens_q[1:][sampling] - 1
        if to.adapters is not None:
            to.adapters.tokens.group(self._slots[token_rows])
            to.adapters.logits.group(self._slots[rows][sampling])
        return PreparedStep(to, num_tokens, num_seqs, tuple(sampling.tolist()), rows[sampling], longest)

    def _check(self, plans: tuple[SeqPlan, ...]) -> list[int]:
        """Return the row of each."""
        rows = []
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
            rows.append(row)
        return rows

    def _force(self, row: int, forced: tuple[int, ...]) -> None:
        """Overwrite the last known ids (beams)."""
        known = int(self._num_tokens[row])
        self._token_ids[row, known - len(forced) : known] = forced

    def _grow(self) -> None:
        """Double the rows: a plan may hold finished sequences beside their successors for one step."""
        size = len(self._num_tokens)
        self._token_ids = np.concatenate((self._token_ids, np.zeros_like(self._token_ids)))
        self._num_tokens = np.concatenate((self._num_tokens, np.zeros_like(self._num_tokens)))
        self._num_settled = np.concatenate((self._num_settled, np.zeros_like(self._num_settled)))
        self._draws = np.concatenate((self._draws, np.zeros_like(self._draws)))
        self._slots = np.concatenate((self._slots, np.zeros_like(self._slots)))
        self._tables = [np.concatenate((table, np.zeros_like(table))) for table in self._tables]
        self._free = list(range(size, 2 * size))[::-1]
