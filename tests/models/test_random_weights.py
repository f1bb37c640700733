"""Random weights are a function of name, shape and seed."""

from __future__ import annotations

from dataclasses import replace

import torch
from tests.models.tiny import SPEC

from quire.models.loader import STD, random_weights
from quire.modelspec import weight_shapes


def test_deterministic_and_independent_of_order() -> None:
    first = dict(random_weights(SPEC, 3, torch.float32))
    again = dict(random_weights(SPEC, 3, torch.float32))
    assert {name: tuple(t.shape) for name, t in first.items()} == weight_shapes(SPEC)
    deeper = dict(random_weights(replace(SPEC, layers=SPEC.layers * 2), 3, torch.float32))
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        assert torch.equal(tensor, deeper[name])


def test_seeds_and_names_differ() -> None:
    first = dict(random_weights(SPEC, 3, torch.float32))
    other = dict(random_weights(SPEC, 4, torch.float32))
    assert not torch.equal(first["embed.weight"], other["embed.weight"])
    assert not torch.equal(first["layers.0.attn.q.weight"], first["layers.1.attn.q.weight"])


def test_distribution() -> None:
    spec = replace(SPEC, vocab_size=300_000)  # more numbers than the pool holds
    weights = dict(random_weights(spec, 0, torch.float32))
    embed = weights["embed.weight"]
    assert abs(embed.std().item() / STD - 1) < 0.01
    assert abs(embed.mean().item()) < STD / 100
    assert torch.unique(embed[:, 0]).numel() > 200_000
    assert torch.unique(embed, dim=0).shape[0] == 300_000
    assert torch.equal(weights["norm.weight"], torch.ones(16))


def test_bfloat16_is_the_rounded_float32_and_norms_are_one() -> None:
    plus_one = replace(SPEC, norm_plus_one=True)
    full = dict(random_weights(plus_one, 1, torch.float32))
    half = dict(random_weights(plus_one, 1, torch.bfloat16))
    for name, tensor in full.items():
        assert torch.equal(tensor.bfloat16(), half[name])
    assert torch.equal(full["norm.weight"], torch.zeros(16))  # the layer adds 1
