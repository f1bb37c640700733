"""Attention of whole sequences against a plain softmax, over more rows than a tile has."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.attention import TILE
from quire.kernels.encoder import encoder_attention, whole_sequences

pytestmark = pytest.mark.unit
HEADS, SIZE = 4, 8
ROWS = 4 * TILE  # held at a time
LENGTHS = (1, ROWS + 44, 17, ROWS, 2 * ROWS + 1, 17)


def naive(qkv: torch.Tensor, kv_heads: int, window: int | None) -> torch.Tensor:
    heads = qkv.view(len(qkv), -1, SIZE).transpose(0, 1).double()
    q, k, v = heads.split((HEADS, kv_heads, kv_heads))
    k, v = (part.repeat_interleave(HEADS // kv_heads, 0) for part in (k, v))
    scores = q @ k.transpose(1, 2) * 0.3
    if window is not None:
        positions = torch.arange(len(qkv))
        scores.masked_fill_((positions[:, None] - positions).abs() > window, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(qkv), -1)


@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("kv_heads", [HEADS, 2, 1])
def test_rows_see_both_ways_as_far_as_the_window(kv_heads: int, window: int | None) -> None:
    torch.manual_seed(3)
    whole = whole_sequences(LENGTHS)
    qkv = torch.randn(whole.num_rows, (HEADS + 2 * kv_heads) * SIZE)
    ours = encoder_attention.reference(qkv, whole, HEADS, kv_heads, 0.3, window)
    for start, length in zip(whole.starts, LENGTHS, strict=False):
        rows = slice(start, start + length)
        assert (ours[rows] - naive(qkv[rows], kv_heads, window)).abs().max() <= 2e-6
        alone = encoder_attention.reference(
            qkv[rows], whole_sequences([length]), HEADS, kv_heads, 0.3, window
        )
        assert torch.equal(alone, ours[rows])
