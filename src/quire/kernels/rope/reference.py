"""RoPE and the KV store in torch: products and sums of fp32 element by element, so exact."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.kernels.kv_blocks import KvView
from quire.kernels.norm.reference import rms_norm
from quire.kernels.registry import register


@dataclass(frozen=True, slots=True)
class QkNorm:
    """The RMSNorm of q and k heads.

    Weights are fp32 ``[head_dim]``, or with ``over_all`` (OLMo 2) ``[heads · head_dim]`` for one norm of all heads.
    """

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float
    over_all: bool = False


@register("apply_rope", "reference")
def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """``x [num_tokens, num_heads, head_dim]``; ``cos, sin [num_tokens, half]``."""
    half = cos.shape[-1]
    assert 2 * half <= x.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [num_tokens, 1, half]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if interleaved:
        first, second = x[..., 0 : 2 * half : 2].float(), x[..., 1 : 2 * half : 2].float()
        y[..., 0 : 2 * half : 2] = (first * cos).sub_(second * sin)
        y[..., 1 : 2 * half : 2] = (second * cos).add_(first * sin)
    else:
        first, second = x[..., :half].float(), x[..., half : 2 * half].float()
        y[..., :half] = (first * cos).sub_(second * sin)
        y[..., half : 2 * half] = (second * cos).add_(first * sin)
    if 2 * half < x.shape[-1]:
        y[..., 2 * half :] = x[..., 2 * half :]
    return y


@register("store_kv", "reference")
def store_kv(
    k: torch.Tensor, v: torch.Tensor | None, kv: KvView, block_ids: torch.Tensor, offsets: torch.Tensor
) -> None:
    """Write the tokens of a step into the cache."""
    kv.write(k, v, block_ids, offsets)


@register("rope_store", "reference")
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
    """``qkv [num_tokens, …]`` → q ``[num_tokens, num_heads, head_dim]``; k and v go to the cache."""
    q_width, k_width = num_heads * kv.head_dim, kv.num_kv_heads * kv.head_dim
    q, k, v = qkv[:, :q_width], qkv[:, q_width : q_width + k_width], qkv[:, q_width + k_width :]
    if norm is not None and norm.over_all:
        q, k = rms_norm(q, norm.q_weight, norm.eps), rms_norm(k, norm.k_weight, norm.eps)
    heads = torch.unflatten(torch.cat((q, k), dim=1), -1, (-1, kv.head_dim))
    q, k = heads[:, :num_heads], heads[:, num_heads:]
    if norm is not None and not norm.over_all:
        q, k = rms_norm(q, norm.q_weight, norm.eps), rms_norm(k, norm.k_weight, norm.eps)
    if cos_sin is not None:
        q, k = (apply_rope(part, *cos_sin, interleaved) for part in (q, k))
    store_kv(k, torch.unflatten(v, -1, (-1, kv.v_head_dim)), kv, block_ids, offsets)
    return q.contiguous()
