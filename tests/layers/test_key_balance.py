"""Powers of two between keys and queries: products stay, and what is large on one side becomes equal on both."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.checks import generator

from quire.kernels.rope import apply_rope
from quire.layers.key_balance import factors_of
from quire.modelspec import AttentionSpec, RopeSpec

HEADS, KV_HEADS, DIM = 4, 2, 16


def spec_of(*, interleaved: bool = False, dim: int = DIM) -> AttentionSpec:
    return AttentionSpec(HEADS, KV_HEADS, DIM, DIM, 0.25, rope=RopeSpec(1e4, dim, interleaved=interleaved))


def biases() -> tuple[torch.Tensor, torch.Tensor]:
    q, k = torch.zeros(HEADS * DIM), torch.randn(KV_HEADS * DIM, generator=generator())
    k[3], k[DIM + 7] = 200.0, -90.0
    return q, k


@pytest.mark.parametrize("dim", [DIM, 8])
@pytest.mark.parametrize("interleaved", [False, True])
def test_products_keep_their_bits(interleaved: bool, dim: int) -> None:
    """Behind RoPE, so both elements of a pair need one factor."""
    spec = spec_of(interleaved=interleaved, dim=dim)
    factors = factors_of(spec, biases(), None)
    assert factors is not None
    assert torch.equal(factors[0] * factors[1], torch.ones(KV_HEADS, DIM))
    assert factors[0].min() <= 1 / 8
    angles = torch.randn(5, dim // 2, generator=generator(1))
    k = torch.randn(5, KV_HEADS, DIM, generator=generator(2)).bfloat16()
    before = apply_rope((k * factors[0]).bfloat16(), angles.cos(), angles.sin(), interleaved)
    after = apply_rope(k, angles.cos(), angles.sin(), interleaved) * factors[0]
    assert torch.equal(before.float(), after.float())


def test_norms_of_q_and_k_are_balanced() -> None:
    q, k = torch.ones(DIM), torch.ones(DIM)
    q[2], q[10], k[5], k[13] = 16.0, 16.0, 64.0, 64.0
    factors = factors_of(spec_of(), (None, None), (q, k))
    assert factors is not None
    scaled_k, scaled_q = k * factors[0, 0], q * factors[1, 0]
    assert torch.equal(scaled_k, scaled_q)


def test_without_biases_and_norms_nothing_moves() -> None:
    assert factors_of(spec_of(), (None, None), None) is None
    assert factors_of(spec_of(), (None, None), (torch.ones(DIM), torch.ones(DIM))) is None
