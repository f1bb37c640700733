"""Native RoPE and KV store (csrc/cpu/rope_store_kernel.cpp): the reference's products and sums, so its bits."""

from __future__ import annotations

import torch

from quire.kernels.kv_blocks import KvView
from quire.kernels.registry import native, register_native
from quire.kernels.rope.reference import QkNorm
from quire.kernels.threads import num_native_threads
from quire.kernels.workspace import address, empty


@register_native("apply_rope")
def apply_rope(
    isa: str, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """``x [num_tokens, num_heads, head_dim]``; ``cos, sin [num_tokens, half]`` fp32."""
    tokens, heads, head_dim = x.shape
    half = cos.shape[-1]
    assert 2 * half <= head_dim
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    if x.stride(2) != 1:
        x = x.contiguous()
    y = empty(tokens, heads, head_dim, dtype=x.dtype)
    native.rope(
        num_native_threads(), isa, x.dtype == torch.bfloat16, interleaved, x.data_ptr(), x.stride(0), x.stride(1),
        cos.data_ptr(), sin.data_ptr(), y.data_ptr(), tokens, heads, head_dim, half,
    )  # fmt: skip
    return y


@register_native("store_kv")
def store_kv(
    isa: str,
    k: torch.Tensor,
    v: torch.Tensor | None,
    kv: KvView,
    block_ids: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    """Write the tokens of a step into the cache."""
    pieces = kv.pieces
    assert kv.layout == "rows" or k.dtype == torch.bfloat16, k.dtype
    if k.stride(2) != 1:
        k = k.contiguous()
    if v is not None:
        assert v.dtype == k.dtype, (v.dtype, k.dtype)
        if v.stride(2) != 1:
            v = v.contiguous()
    native.store_kv(
        num_native_threads(), isa, k.dtype == torch.bfloat16, pieces.dtype == torch.bfloat16, kv.layout == "tiles",
        pieces.dtype == torch.int8, k.data_ptr(), k.stride(0), k.stride(1), address(v),
        0 if v is None else v.stride(0), 0 if v is None else v.stride(1), pieces.data_ptr(), pieces.stride(0),
        pieces.stride(1), block_ids.data_ptr(), offsets.data_ptr(), k.shape[0], k.shape[1], kv.head_dim,
        kv.v_head_dim, kv.block_size,
    )  # fmt: skip


@register_native("rope_store")
def rope_store(
    isa: str,
    qkv: torch.Tensor,
    num_heads: int,
    cos_sin: tuple[torch.Tensor, torch.Tensor] | None,
    norm: QkNorm | None,
    kv: KvView,
    block_ids: torch.Tensor,
    offsets: torch.Tensor,
    interleaved: bool,
) -> torch.Tensor:
    """``qkv [num_tokens, …]`` → q ``[num_tokens, num_heads, head_dim]``; k and v go to the cache."""
    pieces, tokens = kv.pieces, qkv.shape[0]
    assert not kv.v_in_k
    assert kv.layout == "rows" or qkv.dtype == torch.bfloat16, qkv.dtype
    assert qkv.shape[1] == (num_heads + kv.num_kv_heads) * kv.head_dim + kv.num_kv_heads * kv.v_head_dim
    if qkv.stride(1) != 1:
        qkv = qkv.contiguous()
    for part in cos_sin or ():
        assert part.is_contiguous()
    q = empty(tokens, num_heads, kv.head_dim, dtype=qkv.dtype)
    native.rope_store(
        num_native_threads(), isa, qkv.dtype == torch.bfloat16, pieces.dtype == torch.bfloat16,
        kv.layout == "tiles", pieces.dtype == torch.int8, interleaved, qkv.data_ptr(), qkv.stride(0),
        cos_sin[0].data_ptr() if cos_sin is not None else 0, cos_sin[1].data_ptr() if cos_sin is not None else 0,
        cos_sin[0].shape[1] if cos_sin is not None else 0, norm.q_weight.data_ptr() if norm is not None else 0,
        norm.k_weight.data_ptr() if norm is not None else 0, norm is not None and norm.over_all,
        norm.eps if norm is not None else 0.0, q.data_ptr(), pieces.data_ptr(), pieces.stride(0), pieces.stride(1),
        block_ids.data_ptr(), offsets.data_ptr(), tokens, num_heads, kv.num_kv_heads, kv.head_dim, kv.v_head_dim,
        kv.block_size,
    )  # fmt: skip
    return q
