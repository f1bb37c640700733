"""The tensors of one step, as the runner makes them and the layers read them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.kernels.attention.batch import RaggedBatch
from quire.kernels.lora import AdapterRows


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """One cache group. slot_mapping = ``slot_blocks`` · block_size + ``slot_offsets``, both ``[num_tokens]`` int64."""

    slot_blocks: Tensor
    slot_offsets: Tensor
    ragged: RaggedBatch  # cu_seqlens_q, seq_lens, block_table


@dataclass(frozen=True, slots=True)
class AdapterBatch:
    """Which tokens have which adapter: of all tokens, and of those that give logits."""

    tokens: AdapterRows
    logits: AdapterRows


@dataclass(frozen=True, slots=True)
class StepBatch:
    """``input_ids, positions [num_tokens]`` and ``logits_indices [num_logits]``: tokens that give logits; all int64.

    ``adapters`` is None in an engine without adapters.
    """

    input_ids: Tensor
    positions: Tensor
    logits_indices: Tensor
    groups: tuple[GroupBatch, ...]
    adapters: AdapterBatch | None = None

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]
