"""q/k norm, RoPE and the store of K and V in one Triton kernel, for whole heads of a token at once.

Bytes: the fused projection read once; q and the rows of the cache written once. Bound by memory, and by launches when
decoding, which is why this is one kernel. Each head's norm is rounded to the dtype before the rotation, and the
rotation before the store, as the reference does op by op.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels import rope
from quire.kernels.kv_blocks import KvView
from quire.kernels.norm.triton import rms_norm
from quire.kernels.rope import QkNorm
from quire.kernels.triton_overlap import follow, launch_options
from quire.kernels.workspace import unit_stride


@rope.rope_store.version("triton")
def rope_store(
    qkv: Tensor, num_heads: int, cos_sin: tuple[Tensor, Tensor] | None, norm: QkNorm | None, kv: KvView,
    block_ids: Tensor, offsets: Tensor, interleaved: bool,
) -> Tensor:  # fmt: skip
    qkv = unit_stride(qkv)
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


@rope.store_kv.version("triton")
def store_kv(k: Tensor, v: Tensor | None, kv: KvView, block_ids: Tensor, offsets: Tensor) -> None:
    assert (v is None) == kv.v_in_k
    rows = k.flatten(1) if v is None else torch.cat((k.flatten(1), v.flatten(1)), dim=1)
    _launch(rows, 0, None, None, kv, block_ids, offsets, False, rows)


def _launch(
    qkv: Tensor, num_heads: int, cos_sin: tuple[Tensor, Tensor] | None, norm: QkNorm | None, kv: KvView,
    block_ids: Tensor, offsets: Tensor, interleaved: bool, q: Tensor,
) -> None:  # fmt: skip
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
        EIGHT_BITS=_LARGEST.get(kv.pieces.dtype, 0), num_warps=4, **launch_options(),
    )  # fmt: skip


# What the largest magnitude of a position and head becomes.
_LARGEST = {torch.int8: 127, torch.float8_e4m3fn: 448}


ROUND = tl.constexpr(12582912.0)  # 1.5 · 2²³: adding it rounds a small fp32 to nearest even


@triton.jit
@no_type_check
def narrow(values, inverse, target, EIGHT_BITS: tl.constexpr):
    """fp32 values as the cache holds them."""
    if EIGHT_BITS == 127:
        values = (values * inverse + ROUND) - ROUND
    elif EIGHT_BITS == 448:
        values = tl.minimum(tl.maximum(values * inverse, -448.0), 448.0)
    return values.to(target.dtype.element_ty)


@triton.jit
@no_type_check
def inverse_of(largest, EIGHT_BITS: tl.constexpr):
    return tl.where(largest > 0.0, tl.div_rn(EIGHT_BITS * 1.0, tl.where(largest > 0.0, largest, 1.0)), 0.0)


@triton.jit
@no_type_check
def rope_store_heads(
    qkv, stride, cos, sin, q_norm, k_norm, eps, q,
    pieces, block_stride, head_stride, scales, scale_block_stride, scale_head_stride, block_ids, offsets,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr, V_PAD: tl.constexpr,
    NORM: tl.constexpr, INTERLEAVED: tl.constexpr, EIGHT_BITS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (token, part): part 0 is k, 1 is q, 2 is v. The rotated pairs of a head, then its unrotated rest."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head = tl.arange(0, HEADS_PAD)
    row = qkv + token * stride
    block, offset = tl.load(block_ids + token).to(tl.int64), tl.load(offsets + token)
    follow(OVERLAP)
    piece = pieces + block * block_stride + head * head_stride
    scale = scales + block * scale_block_stride + head * scale_head_stride
    scale += BLOCK_SIZE * (HEAD_DIM + V_DIM) // 4 + offset
    if part == 2:
        v_dim = tl.arange(0, V_PAD)
        v_mask = (head < KV_HEADS)[:, None] & (v_dim < V_DIM)[None, :]
        v_source = (HEADS + KV_HEADS) * HEAD_DIM + head[:, None] * V_DIM + v_dim[None, :]
        v_values = tl.load(row + v_source, mask=v_mask, other=0.0).to(tl.float32)
        v_inverse = tl.zeros((HEADS_PAD, 1), tl.float32)
        if EIGHT_BITS > 0:
            v_largest = tl.max(tl.abs(v_values), 1)
            v_inverse = inverse_of(v_largest, EIGHT_BITS)[:, None]
            tl.store(scale + BLOCK_SIZE, tl.div_rn(v_largest, EIGHT_BITS * 1.0), mask=head < KV_HEADS)
        v_head = piece[:, None] + BLOCK_SIZE * HEAD_DIM + offset * V_DIM + v_dim[None, :]
        tl.store(v_head, narrow(v_values, v_inverse, pieces, EIGHT_BITS), mask=v_mask)
    else:
        heads = tl.where(part == 1, HEADS, KV_HEADS)
        source = tl.where(part == 1, 0, HEADS * HEAD_DIM) + head * HEAD_DIM
        pair = tl.arange(0, HALF_PAD)
        rest = 2 * HALF + tl.arange(0, REST_PAD)
        first = pair * 2 if INTERLEAVED else pair
        second = pair * 2 + 1 if INTERLEAVED else pair + HALF
        used = (head < heads)[:, None]
        pair_mask = used & (pair < HALF)[None, :]
        rest_mask = used & (rest < HEAD_DIM)[None, :]
        a = tl.load(row + source[:, None] + first[None, :], mask=pair_mask, other=0.0).to(tl.float32)
        b = tl.load(row + source[:, None] + second[None, :], mask=pair_mask, other=0.0).to(tl.float32)
        c = tl.load(row + source[:, None] + rest[None, :], mask=rest_mask, other=0.0).to(tl.float32)
        if HALF > 0:
            angle = token * HALF + pair
            cosine = tl.load(cos + angle, mask=pair < HALF, other=0.0)[None, :]
            sine = tl.load(sin + angle, mask=pair < HALF, other=0.0)[None, :]
        if NORM:
            weight = q_norm
            if part == 0:
                weight = k_norm
            first_weight = tl.load(weight + first, mask=pair < HALF, other=0.0)[None, :]
            second_weight = tl.load(weight + second, mask=pair < HALF, other=0.0)[None, :]
            rest_weight = tl.load(weight + rest, mask=rest < HEAD_DIM, other=0.0)[None, :]
            square = tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(c * c, 1)
            factor = tl.rsqrt(square / HEAD_DIM + eps)[:, None]
            a *= factor * first_weight
            b *= factor * second_weight
            c *= factor * rest_weight
            a, b = a.to(qkv.dtype.element_ty).to(tl.float32), b.to(qkv.dtype.element_ty).to(tl.float32)
            c = c.to(qkv.dtype.element_ty).to(tl.float32)
        if HALF > 0:
            turned = a * cosine - b * sine
            b = (b * cosine + a * sine).to(qkv.dtype.element_ty).to(tl.float32)
            a = turned.to(qkv.dtype.element_ty).to(tl.float32)
        if part == 1:
            q_head = (q + token * (HEADS * HEAD_DIM) + head * HEAD_DIM)[:, None]
            tl.store(q_head + first[None, :], a.to(q.dtype.element_ty), mask=pair_mask)
            tl.store(q_head + second[None, :], b.to(q.dtype.element_ty), mask=pair_mask)
            tl.store(q_head + rest[None, :], c.to(q.dtype.element_ty), mask=rest_mask)
        else:
            k_inverse = tl.zeros((HEADS_PAD, 1), tl.float32)
            if EIGHT_BITS > 0:
                k_largest = tl.maximum(tl.max(tl.abs(a), 1), tl.max(tl.abs(b), 1))
                k_largest = tl.maximum(k_largest, tl.max(tl.abs(c), 1))
                k_inverse = inverse_of(k_largest, EIGHT_BITS)[:, None]
                tl.store(scale, tl.div_rn(k_largest, EIGHT_BITS * 1.0), mask=head < KV_HEADS)
            k_head = (piece + offset * HEAD_DIM)[:, None]
            tl.store(k_head + first[None, :], narrow(a, k_inverse, pieces, EIGHT_BITS), mask=pair_mask)
            tl.store(k_head + second[None, :], narrow(b, k_inverse, pieces, EIGHT_BITS), mask=pair_mask)
            tl.store(k_head + rest[None, :], narrow(c, k_inverse, pieces, EIGHT_BITS), mask=rest_mask)
