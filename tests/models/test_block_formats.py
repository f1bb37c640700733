"""Expanded blocks against the reader of transformers."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quire.quant.ggml_blocks import decode_mxfp4
from quire.quant.stored import dequantize


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 140, (2, 6, 3), dtype=torch.uint8, generator=generator)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(
        1, 2
    )  # [experts, rows, columns]
    for expert, (packed, powers) in enumerate(zip(blocks, scales, strict=True)):
        found = dequantize(decode_mxfp4(packed, powers))
        assert torch.equal(found.to(dtype), expected[expert])
        assert torch.equal(found, expected[expert].float())
