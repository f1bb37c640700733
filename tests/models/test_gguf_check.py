"""`scales_not_finite` finds the blocks that decoding finds, in every type of ggml."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.families.gguf_types import BLOCK_TYPES
from quire.models.gguf_check import scales_not_finite
from quire.models.safetensors_file import StoredTensor
from quire.quant.ggml_blocks import decode_rows


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_it_finds_what_decoding_finds(name: str) -> None:
    form = BLOCK_TYPES[name]
    raw = np.random.default_rng(7).integers(0, 256, (64, 4 * form.block_bytes), dtype=np.uint8)
    if name == "mxfp4":
        raw[5, 17] = 255
    weight = decode_rows(torch.from_numpy(raw), name)
    wrong = ~torch.isfinite(weight.scale)
    if weight.offset is not None:
        wrong |= ~torch.isfinite(weight.offset)
    blocks = wrong.view(64 * 4, -1).any(1)
    assert blocks.any()
    buffer = mmap.mmap(-1, raw.nbytes)
    buffer.write(raw.tobytes())
    stored = StoredTensor(name, (64, 4 * form.block), buffer, 0, raw.nbytes, Path("model.gguf"))
    (found,) = scales_not_finite({"w": stored})
    first = int(blocks.nonzero()[0])
    assert found.num_nan + found.num_inf == int(blocks.sum())
    assert (found.name, found.first) == ("w", (first // 4, first % 4 * form.block))


def test_finite_scales_and_other_tensors_pass() -> None:
    raw = bytes(2 * 34)
    buffer = mmap.mmap(-1, len(raw))
    stored = StoredTensor("q8_0", (2, 32), buffer, 0, len(raw), Path("model.gguf"))
    plain = StoredTensor("float32", (17,), buffer, 0, len(raw), Path("model.gguf"))
    assert not list(scales_not_finite({"w": stored, "v": plain}))
