"""Rotary position embedding (Su et al. 2021) and the store of keys and values into the cache."""

from __future__ import annotations

import torch

from quire.kernels.kv_blocks import KvView
from quire.kernels.registry import Backend, find
from quire.kernels.rope import native, reference  # noqa: F401  registers both
from quire.kernels.rope.reference import QkNorm

__all__ = ["QkNorm", "apply_rope", "rope_store", "store_kv"]


def apply_rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    backend: Backend = "reference",
) -> torch.Tensor:
    """Rotate the first ``2 · half`` elements of every head, return the result in x's dtype.

    ``x [num_tokens, num_heads, head_dim]``; ``cos, sin [num_tokens, half]`` fp32, of each token's position. Pairs are
    (i, i + half), or (2i, 2i + 1) where ``interleaved``. Elements beyond 2 · half are copied.
    """
    y: torch.Tensor = find("apply_rope", backend)(x, cos, sin, interleaved)
    return y


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor | None,
    kv: KvView,
    block_ids: torch.Tensor,
    offsets: torch.Tensor,
    *,
    backend: Backend = "reference",
) -> None:
    """Write the tokens of a step into the cache: token i goes to block ``block_ids[i]`` at ``offsets[i]``.

    ``k [num_tokens, num_kv_heads, head_dim]``, ``v [num_tokens, num_kv_heads, v_head_dim]`` (None with ``v_in_k``);
    ``block_ids, offsets [num_tokens]`` int64: slot = block · block_size + offset.
    """
    assert (v is None) == kv.v_in_k
    find("store_kv", backend)(k, v, kv, block_ids, offsets)


def rope_store(
    qkv: torch.Tensor,
    num_heads: int,
    cos_sin: tuple[torch.Tensor, torch.Tensor] | None,
    norm: QkNorm | None,
    kv: KvView,
    block_ids: torch.Tensor,
    offsets: torch.Tensor,
    *,
    interleaved: bool = False,
    backend: Backend = "reference",
) -> torch.Tensor:
    """Everything between the projection and attention: q/k norm, `apply_rope`, `store_kv`. Returns q.

    ``qkv [num_tokens, (num_heads + num_kv_heads) · head_dim + num_kv_heads · v_head_dim]`` → ``[num_tokens, num_heads,
    head_dim]`` in its dtype. The others as in `apply_rope` and `store_kv`; None: no rotation, no norm.
    """
    q: torch.Tensor = find("rope_store", backend)(
        qkv, num_heads, cos_sin, norm, kv, block_ids, offsets, interleaved
    )
    return q
