"""OCP's MXFP4 (gpt-oss), which is expanded when a checkpoint is loaded."""

from __future__ import annotations

import torch

# FP4 (E2M1) by its four bits, from the OCP Microscaling Formats specification 1.0, table 5.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


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
