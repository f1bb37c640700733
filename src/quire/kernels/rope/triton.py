"""q/k norm, RoPE and the store of K and V in one Triton kernel, for whole heads of a token at once.

Bytes: the fused projection read once; q and the cache rows written once. Bound by memory, and by launches when
decoding, which is why this is one kernel. Each head's norm is rounded to the dtype before the rotation, and the
rotation before the store, as the reference does op by op.
"""

from __future__ import annotations

import torch
import triton

from quire.kernels.kv_view import KvView
from quire.kernels.norm.triton import rms_norm
from quire.kernels.registry import register
from quire.kernels.rope.qk_norm import QkNorm
from quire.kernels.rope.triton_kernels import rope_store_heads


@register("rope_store", "triton")
def rope_store(
    qkv: torch.Tensor,
    num_heads: int,
    cos_sin: tuple[torch.Tensor, torch.Tensor] | None,
    norm: QkNorm | None,
    kv: KvView,
    block_ids: torch.Tensor,
    offsets: torch.Tensor,
    interleaved: bool,
) -> torch.Tensor:
    """``qkv [num_tokens, …]`` → q ``[num_tokens, num_heads, head_dim]``; k and v go to the pages."""
    if qkv.stride(1) != 1:
        qkv = qkv.contiguous()
    if norm is not None and norm.over_all:  # one norm over all heads: before, on its own
        q_width, k_width = num_heads * kv.head_dim, kv.num_kv_heads * kv.head_dim
        qkv = qkv.clone()
        qkv[:, :q_width] = rms_norm(qkv[:, :q_width], norm.q_weight, norm.eps)
        qkv[:, q_width : q_width + k_width] = rms_norm(
            qkv[:, q_width : q_width + k_width], norm.k_weight, norm.eps
        )
        norm = None
    q = torch.empty(qkv.shape[0], num_heads, kv.head_dim, dtype=qkv.dtype, device=qkv.device)
    _launch(qkv, num_heads, cos_sin, norm, kv, block_ids, offsets, interleaved, q)
    return q


@register("store_kv", "triton")
def store_kv(
    k: torch.Tensor, v: torch.Tensor | None, kv: KvView, block_ids: torch.Tensor, offsets: torch.Tensor
) -> None:
    """Rows of the step → pages."""
    rows = k.flatten(1) if v is None else torch.cat((k.flatten(1), v.flatten(1)), dim=1)
    _launch(rows, 0, None, None, kv, block_ids, offsets, False, rows)


def _launch(
    qkv: torch.Tensor,
    num_heads: int,
    cos_sin: tuple[torch.Tensor, torch.Tensor] | None,
    norm: QkNorm | None,
    kv: KvView,
    block_ids: torch.Tensor,
    offsets: torch.Tensor,
    interleaved: bool,
    q: torch.Tensor,
) -> None:
    assert kv.layout == "rows", "GPU kernels write rows"
    tokens, half = qkv.shape[0], 0 if cos_sin is None else cos_sin[0].shape[1]
    if tokens == 0:
        return
    cos, sin = (qkv, qkv) if cos_sin is None else cos_sin
    assert half == 0 or (cos.is_contiguous() and sin.is_contiguous())
    q_norm, k_norm = (qkv, qkv) if norm is None else (norm.q_weight, norm.k_weight)
    scales = kv.pieces.view(torch.float32) if kv.scaled else kv.pieces
    widest = max(num_heads, kv.num_kv_heads)
    rope_store_heads[(tokens, 2 if kv.v_in_k else 3)](
        qkv, qkv.stride(0), cos, sin, q_norm, k_norm, 0.0 if norm is None else norm.eps, q,
        kv.pieces, kv.pieces.stride(0), kv.pieces.stride(1), scales, scales.stride(0), scales.stride(1),
        block_ids, offsets,
        HEADS=num_heads, KV_HEADS=kv.num_kv_heads, HEADS_PAD=triton.next_power_of_2(widest), HEAD_DIM=kv.head_dim,
        V_DIM=0 if kv.v_in_k else kv.v_head_dim, BLOCK_SIZE=kv.block_size, HALF=half,
        HALF_PAD=triton.next_power_of_2(max(half, 1)), REST_PAD=triton.next_power_of_2(max(kv.head_dim - 2 * half, 1)),
        V_PAD=triton.next_power_of_2(kv.v_head_dim), NORM=norm is not None, INTERLEAVED=interleaved,
        EIGHT_BITS=_LARGEST.get(kv.pieces.dtype, 0), num_warps=4,
    )  # fmt: skip


_LARGEST = {
    torch.int8: 127,
    torch.float8_e4m3fn: 448,
}  # what the largest magnitude of a position and head becomes
