"""Attention over the paged cache: prompt chunks and single tokens in one ragged call.

Row i of ``q`` belongs to the sequence s with ``cu_seqlens_q[s] ≤ i < cu_seqlens_q[s + 1]``; its absolute position is
``seq_lens[s] − (cu_seqlens_q[s + 1] − i)``. It sees the positions 0 … its own, or with a window the last ``window`` of
them. Keys and values, those of this step included, are read from the cache through ``block_table``.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from quire.kernels.attention import native, reference  # noqa: F401  registers both
from quire.kernels.attention.batch import (
    AttentionShape,
    DeviceBatch,
    HostPlan,
    LayerKind,
    Planner,
    RaggedBatch,
    StepLimits,
    padded,
)
from quire.kernels.kv_blocks import KvView
from quire.kernels.registry import Backend, find

__all__ = [
    "AttentionShape", "DeviceBatch", "HostPlan", "LayerKind", "RaggedBatch", "StepLimits", "attention", "padded",
    "planner",
]  # fmt: skip


def attention(
    q: torch.Tensor,
    kv: KvView,
    batch: RaggedBatch,
    shape: AttentionShape,
    sinks: torch.Tensor | None = None,
    *,
    backend: Backend = "reference",
) -> torch.Tensor:
    """``q [num_tokens, num_heads, head_dim]`` → ``[num_tokens, num_heads, v_head_dim]`` in q's dtype.

    Query head h reads kv head ``h // (num_heads / num_kv_heads)``. ``sinks [num_heads]`` fp32: one more logit in each
    head's denominator, with no value (gpt-oss). MLA is this op with one kv head whose value is a part of the key.
    """
    y: torch.Tensor = find("attention", backend)(q, kv, batch, shape, sinks)
    return y


def planner(layers: Iterable[LayerKind], device: torch.device, *, backend: Backend = "reference") -> Planner:
    """Return what plans the steps of one cache group on the host, for layers of these kinds.

    The runner uploads a plan's arrays with the step and restores them to the batch, so that no layer cuts it again.
    """
    made: Planner = find("attention.planner", backend)(layers, device)
    return made
