"""Rotary position embedding (Su et al. 2021) and the store of keys and values into the cache.

The references are products and sums of fp32 element by element, so exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.kv_blocks import KvView
from quire.kernels.norm import rms_norm
from quire.kernels.registry import op


@dataclass(frozen=True, slots=True)
class QkNorm:
    """The RMSNorm of q and k heads.

    Weights are fp32 ``[head_dim]``, or with ``over_all`` (OLMo 2) ``[heads · head_dim]`` for one norm of all heads.
    """

    q_weight: Tensor
    k_weight: Tensor
    eps: float
    over_all: bool = False


@op("apply_rope")
def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first ``2 · half`` elements of every head, return the result in x's dtype.

    ``x [num_tokens, num_heads, head_dim]``; ``cos, sin [num_tokens, half]`` fp32, of each token's position. Pairs are
    (i, i + half), or (2i, 2i + 1) where ``interleaved``. Elements beyond 2 · half are copied.
    """
    half = cos.shape[-1]
    assert 2 * half <= x.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [num_tokens, 1, half]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if interleaved:
        firsts, seconds = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        firsts, seconds = slice(half), slice(half, 2 * half)
    first, second = x[..., firsts].float(), x[..., seconds].float()
    y[..., firsts] = (first * cos).sub_(second * sin)
    y[..., seconds] = (second * cos).add_(first * sin)
    if 2 * half < x.shape[-1]:
        y[..., 2 * half :] = x[..., 2 * half :]
    return y


@op("store_kv")
def store_kv(k: Tensor, v: Tensor | None, kv: KvView, block_ids: Tensor, offsets: Tensor) -> None:
    """Write the tokens of a step into the cache: token i goes to block ``block_ids[i]`` at ``offsets[i]``.

    ``k [num_tokens, num_kv_heads, head_dim]``, ``v [num_tokens, num_kv_heads, v_head_dim]`` (None with ``v_in_k``);
    ``block_ids, offsets [num_tokens]`` int64: slot = block · block_size + offset.
    """
    kv.write(k, v, block_ids, offsets)


@op("rope_store")
def rope_store(
    qkv: Tensor, num_heads: int, cos_sin: tuple[Tensor, Tensor] | None, norm: QkNorm | None, kv: KvView,
    block_ids: Tensor, offsets: Tensor, interleaved: bool,
) -> Tensor:  # fmt: skip
    """Everything between the projection and attention: q/k norm, `apply_rope`, `store_kv`. Returns q.

    ``qkv [num_tokens, (num_heads + num_kv_heads) · head_dim + num_kv_heads · v_head_dim]`` → ``[num_tokens, num_heads,
    head_dim]`` in its dtype. The others as in `apply_rope` and `store_kv`; None: no rotation, no norm.
    """
    q_width, k_width = num_heads * kv.head_dim, kv.num_kv_heads * kv.head_dim
    q, k, v = qkv[:, :q_width], qkv[:, q_width : q_width + k_width], qkv[:, q_width + k_width :]
    if norm is not None and norm.over_all:
        q, k = rms_norm(q, norm.q_weight, norm.eps), rms_norm(k, norm.k_weight, norm.eps)
    heads = torch.unflatten(torch.cat((q, k), dim=1), -1, (-1, kv.head_dim))
    q, k = heads[:, :num_heads], heads[:, num_heads:]
    if norm is not None and not norm.over_all:
        q, k = rms_norm(q, norm.q_weight, norm.eps), rms_norm(k, norm.k_weight, norm.eps)
    if cos_sin is not None:
        q, k = (apply_rope.reference(part, *cos_sin, interleaved) for part in (q, k))
    kv.write(k, torch.unflatten(v, -1, (-1, kv.v_head_dim)), block_ids, offsets)
    return q.contiguous()
