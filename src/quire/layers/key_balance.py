"""Powers of two that move what is large in keys to the queries, before the KV cache rounds keys to 8 or 4 bits.

A product q·k stays what it is when an element of k is divided by a number and the same element of q is multiplied by
it; with a power of two no bit of it changes. Behind RoPE the two elements of a rotary pair need the same one. The error
of a rounded key, seen in a product, grows with |k|·|q|, which is least where k and q are equally large in every pair:

    Σ (k/f)² · Σ (q·f)²  ≥  (Σ |k·q|)²,  and both are equal for f² = |k| / |q|

How large they are is known from what does not depend on the input: biases (Qwen2.5, whose keys have some of 100 and
more), or the weights of norms of q and k (Qwen3, Gemma 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire.modelspec import AttentionSpec


def factors_by_layer(layers: Sequence[Any]) -> dict[int, Tensor]:
    """Return the factors of each decoder layer that stores keys and needs some, by its number."""
    counts: dict[int, Tensor] = {}
    for index, layer in enumerate(layers):
        if layer.spec.attn is None or layer.spec.attn.kv_layer is not None:
            continue
        mixer = layer.mixer
        norms = None if mixer.qk_norm is None else (mixer.qk_norm.q_weight, mixer.qk_norm.k_weight)
        factors = factors_of(mixer.spec, (mixer.qkv.bias_of("q"), mixer.qkv.bias_of("k")), norms)
        if factors is not None:
            counts[index] = factors
    return counts


def factors_of(
    spec: AttentionSpec, biases: tuple[Tensor | None, Tensor | None], norms: tuple[Tensor, Tensor] | None
) -> Tensor | None:
    """Return the factors of keys and of queries, fp32 ``[2, num_kv_heads, head_dim]``; None: all would be 1.

    ``biases`` and ``norms``: of q and k; weights of a norm are those of a head, or of all heads.
    """
    q_bias, k_bias = biases
    heads = (spec.num_heads, spec.num_kv_heads)
    if norms is not None:
        q, k = (
            _of_heads(weight, number, spec.head_dim) ** 2 for weight, number in zip(norms, heads, strict=True)
        )
    elif q_bias is not None and k_bias is not None:
        # What inputs add to an element has a mean square of about 1.
        q, k = (
            _of_heads(bias, number, spec.head_dim) ** 2 + 1.0
            for bias, number in ((q_bias, spec.num_heads), (k_bias, spec.num_kv_heads))
        )
    else:
        return None
    q = q.view(spec.num_kv_heads, -1, spec.head_dim).mean(1)
    squares = torch.stack((_of_pairs(k, spec), _of_pairs(q, spec)))
    # The exponent of the root of |k| / |q|, from squares.
    exponents = squares.clamp_min(2.0**-40).log2() / 4
    exponent = (exponents[0] - exponents[1]).round()
    exponent -= exponent.median(dim=-1, keepdim=True).values
    if not exponent.any():
        return None
    return torch.stack((torch.exp2(-exponent), torch.exp2(exponent))).contiguous()


def _of_heads(x: Tensor, number: int, head_dim: int) -> Tensor:
    """``[head_dim]`` or ``[number · head_dim]`` → ``[number, head_dim]``."""
    return x.float().cpu().view(-1, head_dim).expand(number, head_dim)


def _of_pairs(squares: Tensor, spec: AttentionSpec) -> Tensor:
    """The mean of the two elements of each rotary pair, at both: ``[heads, head_dim]``."""
    if spec.rope is None:
        return squares
    half = spec.rope.dim // 2
    turned, rest = squares[:, : 2 * half], squares[:, 2 * half :]
    if spec.rope.interleaved:
        means = torch.unflatten(turned, 1, (half, 2)).mean(2).repeat_interleave(2, dim=1)
    else:
        means = torch.unflatten(turned, 1, (2, half)).mean(1).repeat(1, 2)
    return torch.cat((means, rest), dim=1)
