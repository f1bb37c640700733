"""The tensors of a step at addresses that do not change, so that a recorded step finds every step's values there."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.attention import RaggedBatch
from quire.kernels.lora import AdapterRows
from quire.layers.step_batch import AdapterBatch, GroupBatch, StepBatch

IntArray = npt.NDArray[np.int64]


class StepBuffers:
    """Room for ``max_tokens`` tokens of ``max_seqs`` sequences with ``max_blocks`` blocks each; int64 throughout.

    ``max_loras``: slots of adapters; 0: `adapters` is None. Memory that no step was large enough for costs nothing.
    ``whole`` is the step that fills all of it.
    """

    def __init__(
        self, max_tokens: int, max_seqs: int, max_blocks: int, num_groups: int, max_loras: int = 0
    ) -> None:
        self.max_tokens = max_tokens
        self.max_seqs = max_seqs
        self.input_ids, self.positions, self.slot_offsets = (_zeros(max_tokens) for _ in range(3))
        self.cu_seqlens_q, self.seq_lens, self.logits_indices = (
            _zeros(max_seqs + 1),
            _zeros(max_seqs),
            _zeros(max_seqs),
        )
        self.slot_blocks = [_zeros(max_tokens) for _ in range(num_groups)]
        self.block_tables = [_zeros(max_seqs, max_blocks) for _ in range(num_groups)]
        self.adapters: AdapterBatch | None = None
        if max_loras:
            self.adapters = AdapterBatch(
                AdapterRows(_zeros(max_tokens), _zeros(max_loras + 1)),
                AdapterRows(_zeros(max_seqs), _zeros(max_loras + 1)),
            )
        self.whole = self.batch(max_tokens, max_seqs, max_seqs)

    def fits(self, num_tokens: int, num_seqs: int) -> bool:
        return num_tokens <= self.max_tokens and num_seqs <= self.max_seqs

    def set_num_seqs(self, num_seqs: int) -> None:
        """Say in ``whole`` how many sequences the step has; its number of tokens comes with the replay."""
        for group in self.whole.groups:
            group.ragged.extents[0] = num_seqs

    def batch(self, num_tokens: int, num_seqs: int, num_logits: int) -> StepBatch:
        """Return views of a step's part of the buffers."""
        slot_offsets = torch.from_numpy(self.slot_offsets[:num_tokens])
        groups = tuple(
            GroupBatch(
                slot_blocks=torch.from_numpy(blocks[:num_tokens]),
                slot_offsets=slot_offsets,
                ragged=RaggedBatch(
                    self.cu_seqlens_q[: num_seqs + 1], self.seq_lens[:num_seqs], table[:num_seqs]
                ),
            )
            for blocks, table in zip(self.slot_blocks, self.block_tables, strict=True)
        )
        return StepBatch(
            input_ids=torch.from_numpy(self.input_ids[:num_tokens]),
            positions=torch.from_numpy(self.positions[:num_tokens]),
            logits_indices=torch.from_numpy(self.logits_indices[:num_logits]),
            groups=groups,
            adapters=self.adapters,
        )


def _zeros(*shape: int) -> IntArray:
    return np.zeros(shape, np.int64)  # mapped, and not touched where it is large
