"""Moves of blocks in list order; clearing."""

from __future__ import annotations

import random

import pytest
import torch
from tests.kernels.checks import SEED, assert_same_bits, generator

from quire.kernels.kv_blocks import clear_blocks, copy_blocks


@pytest.mark.parametrize("count", [0, 1, 2, 7, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moves_take_effect_in_order(count: int, dtype: torch.dtype) -> None:
    """Moves that read what an earlier one wrote, and that write a block twice, among others."""
    rng = random.Random(SEED + count)
    storage = torch.randn(9, 33, generator=generator()).to(dtype)
    moves = [(rng.randrange(9), rng.randrange(9)) for _ in range(count)]
    expected = storage.clone()
    for source, target in moves:
        expected[target] = expected[source].clone()
    copy_blocks(storage, moves)
    assert_same_bits(storage, expected, f"{moves}")


def test_clear() -> None:
    storage = torch.full((5, 8), float("nan"))
    clear_blocks(storage, torch.tensor([3, 0]))
    assert storage[[0, 3]].abs().sum() == 0
    assert storage[[1, 2, 4]].isnan().all()
