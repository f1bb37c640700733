"""`StepPlan` → the tensors of a step, gathered from `WorkerSeqs` with index arithmetic: nothing here loops over tokens.

The tensors lie at addresses that do not change, so that a recorded step finds every step's values there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from quire.errors import StepError
from quire.kernels.attention.batch import RaggedBatch
from quire.kernels.lora import AdapterRows
from quire.layers.attention import AdapterBatch, GroupBatch, StepBatch
from quire.parallel.stripe import Stripe
from quire.runner.sequences import WorkerSeq, WorkerSeqs
from quire.sampling.sampler import Columns, columns_of
from quire.step import SeqPlan

if TYPE_CHECKING:
    from quire.models.decoder import Hidden
    from quire.runner.states import StatePool

IntArray = npt.NDArray[np.int64]


class StepBuffers:
    """The arrays of a step of up to ``max_tokens`` tokens, ``max_seqs`` sequences and ``max_seqs`` logits rows.

    int64 throughout; a sequence has at most ``max_blocks`` blocks. ``max_loras``: slots of adapters; 0: `adapters` is
    None. Memory that no step was large enough for costs nothing. ``whole`` is the step that fills all of it.
    """

    def __init__(
        self, max_tokens: int, max_seqs: int, max_blocks: int, num_groups: int, max_loras: int = 0,
        states: StatePool | None = None,
    ) -> None:  # fmt: skip
        self.max_tokens = max_tokens
        self.max_seqs = max_seqs
        self.input_ids, self.positions, self.slot_offsets = (_zeros(max_tokens) for _ in range(3))
        self.cu_seqlens_q = _zeros(max_seqs + 1)
        self.seq_lens, self.logits_indices = (_zeros(max_seqs) for _ in range(2))
        self.slot_blocks = [_zeros(max_tokens) for _ in range(num_groups)]
        self.block_tables = [_zeros(max_seqs, max_blocks) for _ in range(num_groups)]
        self.adapters: AdapterBatch | None = None
        if max_loras:
            self.adapters = AdapterBatch(
                AdapterRows(_zeros(max_tokens), _zeros(max_loras + 1)),
                AdapterRows(_zeros(max_seqs), _zeros(max_loras + 1)),
            )
        self.states = None if states is None else states.rows(self.cu_seqlens_q, max_seqs, max_tokens)
        self.whole = self.batch(max_tokens, max_seqs, max_seqs)
        if self.states is not None:
            self.whole = replace(self.whole, states=self.states.whole)

    def set_num_seqs(self, num_seqs: int) -> None:
        """Say in ``whole`` how many sequences the step has; its number of tokens comes with the replay."""
        for group in self.whole.groups:
            group.ragged.extents[0] = num_seqs

    def ragged(self, num_seqs: int) -> list[RaggedBatch]:
        """The sequences of a step for each cache group: views, made anew."""
        cu_seqlens_q, seq_lens = self.cu_seqlens_q[: num_seqs + 1], self.seq_lens[:num_seqs]
        return [RaggedBatch(cu_seqlens_q, seq_lens, table[:num_seqs]) for table in self.block_tables]

    def batch(self, num_tokens: int, num_seqs: int, num_logits: int, *, divided: bool = False) -> StepBatch:
        """Return views of a step's part of the buffers. ``divided``: ranks divide its rows (`layers.context`)."""
        slot_offsets = torch.from_numpy(self.slot_offsets[:num_tokens])
        groups = tuple(
            GroupBatch(torch.from_numpy(blocks[:num_tokens]), slot_offsets, ragged, divided)
            for blocks, ragged in zip(self.slot_blocks, self.ragged(num_seqs), strict=True)
        )
        return StepBatch(
            input_ids=torch.from_numpy(self.input_ids[:num_tokens]),
            positions=torch.from_numpy(self.positions[:num_tokens]),
            logits_indices=torch.from_numpy(self.logits_indices[:num_logits]),
            groups=groups,
            adapters=self.adapters,
            states=None if self.states is None else self.states.batch(num_seqs),
        )


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step in ``buffers``: the tensors the model runs on, and the sequences that sample.

    Rows of logits are in the order of ``sampling``: one for the last known token of a sequence, and one for each draft
    that it verifies. A branch of a tree is a sequence more, after those of the plan (`runner.draft_rows`).
    """

    buffers: StepBuffers
    num_tokens: int
    num_seqs: int
    seqs: WorkerSeqs
    sampling: tuple[WorkerSeq, ...]
    rows: IntArray  # in `WorkerSeqs`, where a sequence samples
    columns: Columns  # [num_logits], of the sampler
    num_positions: int  # all positions of the step are below it
    # What the first layer reads in place of the embeddings.
    entering: Hidden | None = None

    @property
    def num_logits(self) -> int:
        return self.columns.size

    @property
    def adapters(self) -> AdapterBatch | None:
        """Which tokens have which adapter; None where none has."""
        adapters = self.buffers.adapters
        return adapters if adapters is not None and adapters.tokens.starts[-1] else None

    @property
    def batch(self) -> StepBatch:
        """Views of the buffers, made anew."""
        return self.batch_of()

    def batch_of(self, *, divided: bool = False) -> StepBatch:
        """As `batch`, possibly with ``divided`` rows."""
        return self.buffers.batch(self.num_tokens, self.num_seqs, self.num_logits, divided=divided)


class InputBatch:
    """Makes the step of each plan. Steps that fit share `buffers`; a larger one gets its own."""

    def __init__(
        self, seqs: WorkerSeqs, block_size: int, max_num_seqs: int, max_num_batched_tokens: int, max_loras: int = 0,
        only_group: int | None = None, lag: int = 0, max_drafts: int = 0, stripe: Stripe | None = None,
        states: StatePool | None = None,
    ) -> None:  # fmt: skip
        """``only_group``: the one cache group whose blocks a draft model's layers use. ``lag``: how many slots, and
        rotary positions, a token's row lies before the token (`quire.runner.heads`). ``max_drafts``: per sequence.
        ``stripe``: of the cache that the tokens are stored to; None: it has all positions. ``states``: of the model.
        """
        self._stripe = stripe
        self._seqs = seqs
        self._lag = lag
        self._block_size = block_size
        # A step's tokens and its logits rows must differ in number where it is recorded (`kernels.tape`).
        max_seqs = min(max_num_seqs * (1 + max_drafts), max_num_batched_tokens)
        max_tokens = max(max_num_batched_tokens, max_seqs + 1)
        self._groups = slice(None) if only_group is None else slice(only_group, only_group + 1)
        tables = seqs.block_tables[self._groups]
        self._shape = (tables[0].shape[1], len(tables), max_loras, states)
        self.buffers = StepBuffers(max_tokens, max_seqs, *self._shape)

    def update_tables(self, plans: Sequence[SeqPlan], seqs: Sequence[WorkerSeq]) -> list[int]:
        """Write the new blocks; return those that hold nothing yet (they start at or after the first new token)."""
        fresh: list[int] = []
        for plan, seq in zip(plans, seqs, strict=True):
            if not plan.new_block_ids:
                continue
            first_empty = -(-plan.num_computed_tokens // self._block_size)
            for table, start, ids in zip(
                self._seqs.block_tables, plan.block_start, plan.new_block_ids, strict=True
            ):
                if ids:  # a negative id stands for no block, which is never read
                    table[seq.row, start : start + len(ids)] = np.maximum(ids, 0)
                    if seq.drafting is not None:
                        seq.drafting.num_filled = min(seq.drafting.num_filled, start * self._block_size)
                    fresh.extend(block for block in ids[max(0, first_empty - start) :] if block >= 0)
        return fresh

    def prepare(self, plans: Sequence[SeqPlan], seqs: Sequence[WorkerSeq]) -> PreparedStep:
        """Write the step into buffers; tokens are in the order of ``plans``, positions ascending in each.

        Raises `StepError` where a plan does not fit what is known here.
        """
        table, rows = self._seqs, np.array([seq.row for seq in seqs])
        computed = np.array([plan.num_computed_tokens for plan in plans])
        lengths = np.array([plan.num_scheduled_tokens for plan in plans])
        drafts = None
        if any(seq.drafting for seq in seqs):
            drafts = import_module("quire.runner.draft_rows").DraftRows(seqs)
            lengths -= drafts.num_beside
        known = table.num_tokens[rows]
        _check(plans, computed, lengths, known)
        sampling = np.flatnonzero((computed + lengths == known) & table.samples[rows])
        total = len(samplers := tuple(seqs[index] for index in sampling.tolist()))
        if drafts is not None:
            total = drafts.of_samplers(samplers)
            rows, computed, lengths = drafts.with_branches(rows, computed, lengths)
        num_seqs, num_tokens, to = len(rows), int(lengths.sum()), self.buffers
        if num_tokens > to.max_tokens or max(num_seqs, total) > to.max_seqs:
            to = StepBuffers(num_tokens, max(num_seqs, total), *self._shape)
        cu_seqlens_q, seq_lens = to.cu_seqlens_q[: num_seqs + 1], to.seq_lens[:num_seqs]
        np.cumsum(lengths, out=cu_seqlens_q[1:])
        np.add(computed - self._lag, lengths, out=seq_lens)
        tokens = np.arange(num_tokens)
        if num_tokens == num_seqs:  # one token each
            positions, token_rows = computed, rows
        else:
            positions = tokens + np.repeat(computed - cu_seqlens_q[:-1], lengths)
            token_rows = np.repeat(rows, lengths)
        to.input_ids[:num_tokens] = table.token_ids[token_rows, positions]
        to.positions[:num_tokens] = places = positions - self._lag if self._lag else positions
        in_table = places // self._block_size
        np.subtract(places, in_table * self._block_size, out=to.slot_offsets[:num_tokens])
        width = -(-(longest := int(seq_lens.max(initial=1))) // self._block_size)
        tables = zip(table.block_tables[self._groups], to.slot_blocks, to.block_tables, strict=True)
        for blocks, slot_blocks, block_table in tables:
            slot_blocks[:num_tokens] = blocks[token_rows, in_table]
            block_table[:num_seqs, :width] = blocks[rows, :width]
        if drafts is not None:
            drafts.branch_out(to, cu_seqlens_q, self._block_size)
        if to.states is not None:
            to.states.fill(plans, table.state_slots[rows])
        _keep_own(to, self._stripe, places)
        ends = cu_seqlens_q[1:][sampling]
        if total == num_tokens and num_seqs == len(plans):
            indices, logits_rows = tokens, token_rows
        elif total > len(samplers):
            assert drafts is not None
            indices, logits_rows = drafts.index(ends, rows[sampling], cu_seqlens_q[len(plans) :])
        else:
            indices, logits_rows = ends - 1, rows[sampling]
        to.logits_indices[:total] = indices
        if to.adapters is not None:
            to.adapters.tokens.group(table.adapter_slots[token_rows])
            to.adapters.logits.group(table.adapter_slots[logits_rows])
        columns = columns_of(table.columns, logits_rows, positions[indices])
        return PreparedStep(to, num_tokens, num_seqs, table, samplers, rows[sampling], columns, longest)

    def force(self, plan: SeqPlan, seq: WorkerSeq) -> None:
        """Overwrite the last known ids (beams)."""
        known = int(self._seqs.num_tokens[seq.row])
        self._seqs.token_ids[seq.row, known - len(plan.forced_token_ids) : known] = plan.forced_token_ids


def _keep_own(to: StepBuffers, stripe: Stripe | None, places: IntArray) -> None:
    """Leave tokens whose ``places`` lie on other ranks without a slot, and count offsets in this rank's blocks."""
    if stripe is None:
        return
    own = stripe.has(places)
    for slot_blocks in to.slot_blocks:
        slot_blocks[: len(places)][~own] = -1
    to.slot_offsets[: len(places)] %= stripe.size


def _check(plans: Sequence[SeqPlan], computed: IntArray, lengths: IntArray, known: IntArray) -> None:
    wrong = (lengths <= 0) | (lengths > known - computed)
    if wrong.any():
        first = int(wrong.argmax())
        plan, count = plans[first], known[first]
        raise StepError(
            f"Sequence {plan.seq_id}: {plan.num_scheduled_tokens} tokens from {plan.num_computed_tokens} on are "
            f"planned, and {count} tokens are known."
        )


def _zeros(*shape: int) -> IntArray:
    return np.zeros(shape, np.int64)  # mapped, and not touched where it is large
