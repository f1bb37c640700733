"""`DraftChain`: drafts of a recorded model or head, one after another in one native call (csrc/draft_chain.h)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.registry import VECTOR_LEVELS, Backend, native
from quire.kernels.tape import StepTape
from quire.kernels.threads import num_native_threads
from quire.runner.input_batch import StepBuffers
from quire.runner.sequences import WorkerSeqs


class Feedback(NamedTuple):
    """What a head's row says of its own token, which the next row reads as its hidden state."""

    slots: npt.NDArray[np.int64]  # [max_tokens], where each row of the step reads
    found: Tensor  # [max_logits, hidden_size]
    hidden: Tensor  # [num_slots, hidden_size]


class Recorded(NamedTuple):
    """A recorded step that gives logits ``tape.output`` of the ids ``ids`` of the vocabulary (None: of all)."""

    tape: StepTape
    buffers: StepBuffers
    ids: Tensor | None = None
    feedback: Feedback | None = None


class DraftChain:
    """Runs `Recorded` steps, samples, and writes the step of what was sampled, as often as drafts are wanted."""

    def __init__(
        self, recorded: Recorded, seqs: WorkerSeqs, group: int, lag: int, vocab_size: int, block_size: int,
        backend: Backend,
    ) -> None:  # fmt: skip
        """``group``, ``lag``: as of `InputBatch`. ``backend``: of sampling; a native level."""
        assert backend in VECTOR_LEVELS
        self._seqs, self._group = seqs, group
        tape, buffers, ids, feedback = recorded
        logits = tape.output
        (slot_blocks,), (table,) = buffers.slot_blocks, buffers.block_tables
        assert logits.is_contiguous()
        step = (
            buffers.input_ids, buffers.positions, slot_blocks, buffers.slot_offsets, buffers.cu_seqlens_q,
            buffers.seq_lens, buffers.logits_indices, buffers.whole.groups[0].ragged.extents, table,
        )  # fmt: skip
        self.max_tokens, self.max_seqs = buffers.max_tokens, buffers.max_seqs
        self._spread = None if ids is None else torch.full((0, vocab_size), -torch.inf)
        of_head = (0, 0, 0, 0)
        if feedback is not None:
            hidden_rows, hidden = feedback.found, feedback.hidden
            assert hidden_rows.is_contiguous()
            assert hidden_rows.dtype == hidden.dtype
            row_bytes = hidden_rows.shape[1] * hidden_rows.element_size()
            of_head = (feedback.slots.ctypes.data, hidden_rows.data_ptr(), hidden.data_ptr(), row_bytes)
        self._native = native.DraftChain(
            tape.native, backend, tuple(array.ctypes.data for array in step), buffers.max_tokens,
            table.shape[1], block_size, lag, logits.data_ptr(), vocab_size, logits.shape[1],
            0 if ids is None else ids.data_ptr(), *of_head,
        )  # fmt: skip
        self._recorded = recorded  # keeps the memory
        # Of `run`: (row, start, end, count) of each chain, and its drafts.
        self._chains = np.empty((self.max_seqs, 4), np.int64)
        self._drafts = np.empty(0, np.int64)
        # Of `WorkerSeqs`, which makes new arrays when it grows, and where its arrays and these lie.
        self._tables: list[npt.NDArray[np.int32]] = []
        self._addresses = (0, 0, 0, 0, 0, 0)
        self._at_drafts = 0

    def run(self, chains: Sequence[tuple[int, int, int, int]]) -> list[list[int]]:
        """Return the drafts of each of ``chains``: (row of `WorkerSeqs`, start, end, count), counts descending.

        The tokens start … end − 1 are computed, of which the last is the last of its sequence, and then a row for each
        draft but the last. The sequences have blocks for them, and no logits processors.
        """
        seqs, count = self._seqs, chains[0][3]
        if self._tables is not seqs.block_tables or self._drafts.size < len(chains) * count:
            self._point_to(seqs.block_tables, len(chains) * count)
        self._chains[: len(chains)] = chains
        spread = 0
        if self._spread is not None:
            if len(self._spread) < len(chains):
                self._spread = torch.full((len(chains), self._spread.shape[1]), -torch.inf)
            spread = self._spread.data_ptr()
        self._native.run(num_native_threads(), *self._addresses, len(chains), spread, self._at_drafts)
        drafts: list[int] = self._drafts[: len(chains) * count].tolist()
        return [drafts[place * count : place * count + chain[3]] for place, chain in enumerate(chains)]

    def _point_to(self, tables: list[npt.NDArray[np.int32]], num_drafts: int) -> None:
        """Note where the sequences' arrays lie now, and have room for as many drafts."""
        self._drafts = np.empty(max(num_drafts, self._drafts.size), np.int64)
        self._tables, table, ids = tables, tables[self._group], self._seqs.token_ids
        at_columns, at_chains = self._seqs.columns.ctypes.data, self._chains.ctypes.data
        self._addresses = (
            ids.ctypes.data, ids.shape[1], table.ctypes.data, table.shape[1], at_columns, at_chains,
        )  # fmt: skip
        self._at_drafts = self._drafts.ctypes.data


def can_chain(backend: Backend) -> bool:
    """Whether there are native chains where sampling runs on ``backend``."""
    return backend in VECTOR_LEVELS and native is not None and hasattr(native, "DraftChain")
