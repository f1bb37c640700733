"""Attention where a sequence's keys and values lie on several ranks (`parallel.stripe`): parts, and their sum.

With V_r, l_r and m_r the weighted values, the sum of the weights and the maximum of one row on rank r, over the
positions there (Milakov and Gimelshein 2018; Liu et al. 2023 for sequences over several devices):

    M = max_r m_r      w_r = 2^(m_r − M)      out = Σ_r w_r V_r / Σ_r w_r l_r      summed in order of r

A rank's part of a row is a function of the row's query and of the keys there, and the sum has one order: so the bits of
a row do not depend on its chunk, as they would with the order in which blocks go round a ring.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.kernels.attention import attend_chunks
from quire.kernels.attention.batch import AttentionShape, RaggedBatch
from quire.kernels.attention.native import call_native
from quire.kernels.kv_blocks import KvView
from quire.kernels.registry import NATIVE_LEVELS, native, op
from quire.kernels.threads import num_native_threads
from quire.kernels.workspace import address, empty

# Columns of a partial result after its values: the sum of the weights, and the maximum in powers of two.
EXTRA = 2


@op("partial_attention")
def partial_attention(q: Tensor, kv: KvView, batch: RaggedBatch, shape: AttentionShape) -> Tensor:
    """Attention over the positions that ``kv.stripe`` has, as far as a row sees them: as `attention`, without sinks.

    Returns fp32 ``[num_tokens, num_heads, v_head_dim + 2]``: V_r, l_r, m_r. A row that sees nothing here has l_r = 0.
    """
    num_tokens, num_heads, _ = q.shape
    kv_heads, group = kv.num_kv_heads, num_heads // kv.num_kv_heads
    size = kv.v_head_dim + EXTRA
    if num_tokens == 0:
        return torch.empty(0, num_heads, size)
    out = torch.empty(kv_heads, num_tokens * group + 1, size)
    for chunk, acc, total, top in attend_chunks(q, kv, batch, shape):
        sums = torch.stack((total, top * math.log2(math.e)), dim=-1)
        part = torch.cat((acc[..., : kv.v_head_dim], sums), dim=-1)
        out.index_copy_(1, chunk.row_index, part.reshape(kv_heads, -1, size))
    out = out[:, :-1].view(kv_heads, num_tokens, group, size)
    return out.transpose(0, 1).reshape(num_tokens, num_heads, size)


@op("merge_attention")
def merge_attention(parts: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``parts`` fp32 ``[num_tokens, ranks, num_heads, v_head_dim + 2]``, contiguous: the partial results of each rank.

    Returns ``[num_tokens, num_heads, v_head_dim]`` in ``dtype``. ``sinks`` as of `attention`.
    """
    tops = parts[..., -1]
    highest = tops.amax(1)
    if sinks is not None:
        sinks = sinks * math.log2(math.e)
        highest = torch.maximum(highest, sinks)
    weighted = parts[..., :-1] * _power(tops - highest.unsqueeze(1)).unsqueeze(-1)
    sums = weighted[:, 0]
    for rank in range(1, parts.shape[1]):
        sums = sums + weighted[:, rank]
    total = sums[..., -1:]
    if sinks is not None:
        total = total + _power(sinks - highest).unsqueeze(-1)
    return (sums[..., :-1] / total).to(dtype)


def _power(x: Tensor) -> Tensor:
    """2^x; torch's own exp2 gives the last elements of a tensor other bits than the same numbers elsewhere."""
    return torch.exp(x * math.log(2))


@partial_attention.native(NATIVE_LEVELS)
def native_partial_attention(
    isa: str, q: Tensor, kv: KvView, batch: RaggedBatch, shape: AttentionShape
) -> Tensor:
    assert kv.stripe is not None
    y = empty(*q.shape[:2], kv.v_head_dim + EXTRA, dtype=torch.float32)
    call_native(isa, q, kv, batch, shape, None, y, (kv.stripe.index, kv.stripe.count), partial=True)
    return y


@merge_attention.native()
def native_merge_attention(isa: str, parts: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
    num_tokens, ranks, num_heads, size = parts.shape
    assert parts.is_contiguous()
    assert sinks is None or sinks.dtype == torch.float32
    y = empty(num_tokens, num_heads, size - EXTRA, dtype=dtype)
    native.merge_attention(
        num_native_threads(), isa, dtype == torch.bfloat16, parts.data_ptr(), address(sinks), y.data_ptr(), num_tokens,
        ranks, num_heads, size - EXTRA,
    )  # fmt: skip
    return y
