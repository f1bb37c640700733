"""Attention over the paged cache: prompt chunks and single tokens in one ragged call.

Row i of ``q`` belongs to the sequence s with ``cu_seqlens_q[s] ≤ i < cu_seqlens_q[s + 1]``; its absolute position is
``seq_lens[s] − (cu_seqlens_q[s + 1] − i)``. It sees the positions 0 … its own, or with a window the last ``window`` of
them. Keys and values, those of this step included, are read from the cache through ``block_table``.
"""

from __future__ import annotations

import torch

from quire.kernels.attention import native, reference  # noqa: F401  registers them
from quire.kernels.attention.batch import AttentionShape, RaggedBatch
from quire.kernels.kv_blocks import KvView
from quire.kernels.registry import Backend, find

__all__ = ["AttentionShape", "RaggedBatch", "attention"]


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
