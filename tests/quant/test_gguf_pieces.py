"""Matrices in ggml's blocks whose heads of inputs lie in another order: Qwen3.5's projection after the delta rule."""

from __future__ import annotations

import mmap
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tests.quant.ggml_random import random_blocks

from quire.errors import UnsupportedModelError
from quire.families.gguf_types import BLOCK_TYPES
from quire.families.weights import Take
from quire.models.safetensors_file import StoredTensor
from quire.models.stored_weights import open_quantized
from quire.models.weight_sources import Source
from quire.parallel.shard import Cut
from quire.quant.stored import StoredMatrix

NAME = "blk.0.ssm_out.weight"
SHAPE = (40, 512)


def opened(name: str, head: int, cut: Cut) -> tuple[StoredMatrix, torch.Tensor]:
    """Return the matrix in the order of two key heads, and the same of the numbers as the gguf package reads them."""
    kind = gguf.GGMLQuantizationType[name.upper()]
    raw = random_blocks(kind, SHAPE, 0.3, np.random.default_rng(5))
    buffer = mmap.mmap(-1, raw.nbytes)
    buffer.write(raw.tobytes())
    stored = StoredTensor(name, SHAPE, buffer, 0, raw.nbytes, Path("model.gguf"), BLOCK_TYPES[name].held)
    places = [2 * j + i for i in range(2) for j in range(SHAPE[1] // head // 2)]
    pieces = tuple(range(place * head, (place + 1) * head) for place in places)
    take = Take((NAME,), SHAPE, dim=1, pieces=pieces)
    matrix = open_quantized(Source(take, stored.held.wide), {NAME: stored}, cut)
    assert isinstance(matrix, StoredMatrix)
    order = np.concatenate([np.arange(piece.start, piece.stop) for piece in pieces])
    return matrix, torch.from_numpy(gguf.quants.dequantize(raw, kind)[:, order].copy())


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_heads_of_inputs_are_put_back_in_order(name: str) -> None:
    matrix, expected = opened(name, 128, Cut("w"))
    torch.testing.assert_close(matrix.expand(torch.float32), expected, rtol=2e-7, atol=2e-7)
    part = range(256, 512)
    second, _ = opened(name, 128, Cut("w", columns=part))
    torch.testing.assert_close(
        second.expand(torch.float32), matrix.expand(torch.float32)[:, 256:], rtol=0, atol=0
    )


def test_a_head_within_a_group_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=rf"{NAME} has blocks with a scale for 32 inputs"):
        opened("q8_0", 16, Cut("w"))
