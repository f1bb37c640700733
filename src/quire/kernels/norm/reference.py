"""RMSNorm in torch. It is exact; its one reduction needs a reason:

torch sums a row in an order given by the row's length alone, as long as it does not split one row over threads: it
does so only for a single row of 32,768 elements or more, which the assertion excludes. ``rsqrt``, ``mul`` and the
mean of fp32 gave the same bits in the vector body and in the scalar tail of a loop (measured; bf16 ``rsqrt`` did
not, hence fp32 throughout).
"""

from __future__ import annotations

import torch

from quire.kernels.linear.reference import quantize_rows, quantize_rows_to_fp8
from quire.kernels.quantized_rows import QuantizedRows
from quire.kernels.registry import register

MAX_ROW = 32_768  # elements; from here on torch may split the sum of a single row over threads


@register("rms_norm", "reference")
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x [..., size]`` → the same shape and dtype."""
    assert x.shape[-1] < MAX_ROW
    values = x.float()
    mean_square = (values * values).mean(-1, keepdim=True)
    return (values * torch.rsqrt(mean_square.add_(eps))).mul_(weight).to(x.dtype)


@register("add_rms_norm", "reference")
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both ``[num_tokens, size]`` → (normed, sum); the sum is rounded to the dtype before the norm, as stored."""
    residual = residual + x
    return rms_norm(residual, weight, eps), residual


@register("rms_norm_to_int8", "reference")
def rms_norm_to_int8(x: torch.Tensor, weight: torch.Tensor, eps: float, group: int | None) -> QuantizedRows:
    return quantize_rows(rms_norm(x, weight, eps), group)


@register("add_rms_norm_to_int8", "reference")
def add_rms_norm_to_int8(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group: int | None
) -> tuple[QuantizedRows, torch.Tensor]:
    normed, total = add_rms_norm(x, residual, weight, eps)
    return quantize_rows(normed, group), total


@register("add_rms_norm_to_fp8", "reference")
def add_rms_norm_to_fp8(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The norm as fp8 rows with a scale each: (``[num_tokens, size]``, fp32 ``[num_tokens]``, residual + x)."""
    total = x if residual is None else residual + x
    rows = quantize_rows_to_fp8(rms_norm(total, weight, eps), None)
    return rows.q, rows.scale.squeeze(1), total
