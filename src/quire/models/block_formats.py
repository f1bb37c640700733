"""Block formats that are expanded when a checkpoint is loaded: ggml's Q8_0 and OCP's MXFP4 (gpt-oss)."""

from __future__ import annotations

import torch

Q8_BLOCK = 34  # bytes: a float16 scale and 32 int8
# FP4 (E2M1) by its four bits, from the OCP Microscaling Formats specification 1.0, table 5.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def expand_q8_0(raw: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """``raw [num_blocks · 34]`` uint8 → float32 of ``shape``: value = scale · int8."""
    blocks = raw.view(-1, Q8_BLOCK)
    scales = blocks[:, :2].contiguous().view(torch.float16).float()  # [num_blocks, 1]
    values = blocks[:, 2:].contiguous().view(torch.int8).float()  # [num_blocks, 32]
    return values.mul_(scales).view(shape)


def expand_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``[…, rows, 32 · groups]`` of ``dtype``: value = fp4 · 2 ** (scale − 127), exact in bfloat16 too.

    ``blocks [..., rows, groups, 16]`` uint8, two values a byte with the low half first; ``scales [..., rows, groups]``
    uint8.
    """
    pairs = torch.tensor([(_FP4[byte & 15], _FP4[byte >> 4]) for byte in range(256)], dtype=dtype)
    out = torch.empty((*scales.shape[:-1], 32 * scales.shape[-1]), dtype=dtype)
    for target, packed, scale in zip(
        out, blocks, scales, strict=True
    ):  # expert by expert: indices take 8 bytes each
        powers = torch.exp2(scale.float() - 127.0).to(dtype).unsqueeze(-1)
        values = pairs[packed.long()].flatten(-2).mul_(powers)  # [rows, groups, 32]
        target.copy_(values.flatten(-2))
    return out
