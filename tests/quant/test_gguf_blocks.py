"""Every block format against the gguf package's reader, on random bytes: any bytes are a legal block."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from quire.families.gguf_types import BLOCK_TYPES
from quire.quant.stored import decode_rows, dequantize

SEED = 11


def random_rows(name: str, rows: int, blocks: int) -> np.ndarray:
    """Random blocks whose float16 scales are finite."""
    form = BLOCK_TYPES[name]
    rng = np.random.default_rng(SEED)
    raw = rng.integers(0, 256, (rows, blocks, form.block_bytes), dtype=np.uint8)
    scales = rng.standard_normal((rows, blocks, 2)).astype(np.float16)
    at = {"q6_k": 208}.get(name, 0)
    size = 2 if name in ("q8_0", "q4_0", "q5_0", "q6_k") else 4
    raw[:, :, at : at + size] = scales.view(np.uint8)[:, :, :size]
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_decoded_blocks_equal_the_oracle(name: str) -> None:
    raw = random_rows(name, 5, 3)
    expected = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name.upper()]).copy())
    found = decode_rows(torch.from_numpy(raw), name)
    form = BLOCK_TYPES[name]
    assert found.q.dtype == torch.int8
    assert found.shape == (5, 3 * form.block)
    low, high = (-8, 7) if form.held.kind == "int4" else (-127 - 1, 127)
    assert low <= found.q.min()
    assert found.q.max() <= high
    assert form.held.group is not None
    assert found.scale.shape == (5, 3 * form.block // form.held.group)
    assert (found.offset is not None) == form.held.has_offset
    error = (dequantize(found) - expected).abs().max() / expected.abs().max()
    print(f"{name}: {error:.1e} of the largest, seed {SEED}")
    assert error <= (
        2e-7 if form.held.has_offset else 0.0
    )  # a zero point folded into the offset is rounded once more
