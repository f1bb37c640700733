"""RMSNorm (Zhang and Sennrich 2019), in fp32 with one rounding at the end.

``weight`` is fp32. Gemma's ``1 + w`` is formed once, at load (`layers.norm`), so the op has one form.

The reference is exact; its one reduction needs a reason: torch sums a row in an order given by the row's length alone,
as long as it does not split one row over threads. It does so only for a single row of 32,768 elements or more, which
the assertion excludes. ``rsqrt``, ``mul`` and the mean of fp32 gave the same bits in the vector body and in the scalar
tail of a loop (measured; bf16 ``rsqrt`` did not, hence fp32 throughout).
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.linear.reference import quantize_rows, quantize_rows_to_fp8
from quire.kernels.quantized_rows import QuantizedRows
from quire.kernels.registry import op

MAX_ROW = 32_768  # elements; from here on torch may split the sum of a single row over threads


@op("rms_norm")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x [..., size]`` → ``x / sqrt(mean(x²) + eps) · weight`` in x's dtype.

    ``weight``: ``[size]``, or ``[num_heads, size]`` for ``x [num_tokens, num_heads, size]`` with one weight per head.
    """
    assert x.shape[-1] < MAX_ROW
    values = x.float()
    mean_square = (values * values).mean(-1, keepdim=True)
    return (values * torch.rsqrt(mean_square.add_(eps))).mul_(weight).to(x.dtype)


@op("add_rms_norm")
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return ``(rms_norm(residual + x), residual + x)``; all ``[num_tokens, size]``.

    The sum is rounded to the dtype before the norm, as stored.
    """
    residual = residual + x
    return rms_norm(residual, weight, eps), residual


@op("rms_norm_to_int8")
def rms_norm_to_int8(x: Tensor, weight: Tensor, eps: float, group: int | None) -> QuantizedRows:
    """`quantize_rows` of the norm of ``x [num_tokens, size]``: the same bits in one pass."""
    return quantize_rows(rms_norm(x, weight, eps), group)


@op("add_rms_norm_to_int8")
def add_rms_norm_to_int8(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: int | None
) -> tuple[QuantizedRows, Tensor]:
    """`quantize_rows` of the norm that `add_rms_norm` gives: (int8 rows of the norm, residual + x)."""
    normed, total = add_rms_norm(x, residual, weight, eps)
    return quantize_rows(normed, group), total


@op("add_rms_norm_to_fp8")
def add_rms_norm_to_fp8(
    x: Tensor | None, residual: Tensor, weight: Tensor, eps: float
) -> tuple[QuantizedRows, Tensor]:
    """The norm of residual + x as fp8 rows with one scale each, and the sum; x None: nothing to add."""
    total = residual if x is None else residual + x
    return quantize_rows_to_fp8(rms_norm(total, weight, eps), None), total
