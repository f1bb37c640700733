"""`DraftChain`: drafts of a recorded model or head, one after another in one native call (csrc/draft_chain.h)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.registry import VECTOR_LEVELS, Backend, native
from quire.kernels.tape import StepTape
from quire.kernels.threads import num_native_threads
from quire.runner.input_batch import PreparedStep, StepBuffers


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

    def __init__(self, recorded: Recorded, vocab_size: int, block_size: int, backend: Backend) -> None:
        """``backend``: of sampling; a native level."""
        assert backend in VECTOR_LEVELS
        self.recorded = recorded
        buffers, logits, ids, feedback = recorded.buffers, recorded.tape.output, recorded.ids, recorded.feedback
        (slot_blocks,), (table,) = buffers.slot_blocks, buffers.block_tables
        assert logits.is_contiguous()
        step = (
            buffers.input_ids, buffers.positions, slot_blocks, buffers.slot_offsets, buffers.cu_seqlens_q,
            buffers.seq_lens, buffers.logits_indices, buffers.whole.groups[0].ragged.extents, table,
        )  # fmt: skip
        self._spread = None if ids is None else torch.full((0, vocab_size), -torch.inf)
        of_head = (0, 0, 0, 0)
        if feedback is not None:
            found, hidden = feedback.found, feedback.hidden
            assert found.is_contiguous()
            assert found.dtype == hidden.dtype
            row_bytes = found.shape[1] * found.element_size()
            of_head = (feedback.slots.ctypes.data, found.data_ptr(), hidden.data_ptr(), row_bytes)
        self._native = native.DraftChain(
            recorded.tape.native, backend, tuple(array.ctypes.data for array in step), table.shape[1], block_size,
            logits.data_ptr(), vocab_size, logits.shape[1], 0 if ids is None else ids.data_ptr(), *of_head,
        )  # fmt: skip

    def run(self, step: PreparedStep, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return drafts ``[num_seqs, counts[0]]``, of which sequence i has ``counts[i]`` ≥ 1, in descending order.

        Every sequence of ``step`` samples, and has blocks for its drafts in the block table of the step. Drafts have no
        logits processors.
        """
        num_seqs = step.num_seqs
        assert step.buffers is self.recorded.buffers
        assert step.num_logits == num_seqs == len(counts)
        spread = 0
        if self._spread is not None:
            if len(self._spread) < num_seqs:
                self._spread = torch.full((num_seqs, self._spread.shape[1]), -torch.inf)
            spread = self._spread.data_ptr()
        step.buffers.set_num_seqs(num_seqs)
        drafts = np.zeros((num_seqs, int(counts[0])), np.int64)
        self._native.run(
            num_native_threads(), step.num_tokens, num_seqs, counts.ctypes.data, step.columns.ctypes.data, spread,
            drafts.ctypes.data,
        )  # fmt: skip
        return drafts


def can_chain(backend: Backend) -> bool:
    """Whether there are native chains where sampling runs on ``backend``."""
    return backend in VECTOR_LEVELS and native is not None and hasattr(native, "DraftChain")
