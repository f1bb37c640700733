"""Native rotation and store of keys and values (csrc/cpu/rope_store_kernel.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.kv_blocks import KvView
from quire.kernels.registry import native
from quire.kernels.rope import QkNorm, apply_rope, rope_store, store_kv
from quire.kernels.workspace import empty, heads_at, native_call, rows_at, unit_stride


@apply_rope.native()
def native_apply_rope(isa: str, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    (tokens, heads, head_dim), half = x.shape, cos.shape[-1]
    assert 2 * half <= head_dim
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    x, y = unit_stride(x), empty(tokens, heads, head_dim, dtype=x.dtype)
    native.rope(
        *native_call(isa, x), interleaved, *heads_at(x), cos.data_ptr(), sin.data_ptr(), y.data_ptr(), tokens, heads,
        head_dim, half,
    )  # fmt: skip
    return y


@store_kv.native()
def native_store_kv(
    isa: str, k: Tensor, v: Tensor | None, kv: KvView, block_ids: Tensor, offsets: Tensor
) -> None:
    pieces, k, v_heads = kv.pieces, unit_stride(k), (0, 0, 0)
    assert kv.layout == "rows" or k.dtype == torch.bfloat16, k.dtype
    assert (v is None) == kv.v_in_k
    if v is not None:
        assert v.dtype == k.dtype, (v.dtype, k.dtype)
        v = unit_stride(v)
        v_heads = heads_at(v)
    native.store_kv(
        *native_call(isa, k), pieces.dtype == torch.bfloat16, kv.layout == "tiles", *kv.native_codes(0),
        *heads_at(k), *v_heads, *heads_at(pieces), block_ids.data_ptr(), offsets.data_ptr(), k.shape[0],
        k.shape[1], kv.head_dim, kv.v_head_dim, kv.block_size,
    )  # fmt: skip


@rope_store.native()
def native_rope_store(
    isa: str, qkv: Tensor, num_heads: int, cos_sin: tuple[Tensor, Tensor] | None, norm: QkNorm | None, kv: KvView,
    block_ids: Tensor, offsets: Tensor, interleaved: bool,
) -> Tensor:  # fmt: skip
    pieces, qkv, angles = kv.pieces, unit_stride(qkv), (0, 0, 0)
    q_weight, k_weight, over_all, eps = 0, 0, False, 0.0
    assert not kv.v_in_k
    assert kv.layout == "rows" or qkv.dtype == torch.bfloat16, qkv.dtype
    assert qkv.shape[1] == (num_heads + kv.num_kv_heads) * kv.head_dim + kv.num_kv_heads * kv.v_head_dim
    if cos_sin is not None:
        cos, sin = cos_sin
        assert cos.is_contiguous()
        assert sin.is_contiguous()
        angles = cos.data_ptr(), sin.data_ptr(), cos.shape[1]
    if norm is not None:
        q_weight, k_weight = norm.q_weight.data_ptr(), norm.k_weight.data_ptr()
        over_all, eps = norm.over_all, norm.eps
    q = empty(qkv.shape[0], num_heads, kv.head_dim, dtype=qkv.dtype)
    native.rope_store(
        *native_call(isa, qkv), pieces.dtype == torch.bfloat16, kv.layout == "tiles", *kv.native_codes(0),
        interleaved, *rows_at(qkv), *angles, q_weight, k_weight, over_all, eps, q.data_ptr(), *heads_at(pieces),
        block_ids.data_ptr(), offsets.data_ptr(), qkv.shape[0], num_heads, kv.num_kv_heads, kv.head_dim, kv.v_head_dim,
        kv.block_size,
    )  # fmt: skip
    return q
