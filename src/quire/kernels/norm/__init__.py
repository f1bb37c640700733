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
from quire.kernels.quantized_rows import NO_ROWS, QuantizedRows, empty_rows, row_words
from quire.kernels.registry import native, op
from quire.kernels.workspace import address, empty, native_call, rows_at, unit_stride
from quire.weight_format import RowFormat

MAX_ROW = 32_768  # elements; torch may split the sum of a row this long


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
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, wide: bool = False
) -> tuple[Tensor, Tensor]:
    """Return ``(rms_norm(residual + x), residual + x)``; all ``[num_tokens, size]``, the norm in x's dtype.

    The sum is rounded to x's dtype before the norm, as stored. ``wide``: it is fp32, and ``residual`` may be.
    """
    total = residual.float() + x.float() if wide else residual + x
    return rms_norm.reference(total, weight, eps).to(x.dtype), total


@op("rms_norm_to_int8")
def rms_norm_to_int8(x: Tensor, weight: Tensor, eps: float, format: RowFormat) -> QuantizedRows:
    """`quantize_rows` of the norm of ``x [num_tokens, size]``: the same bits in one pass."""
    return quantize_rows(rms_norm(x, weight, eps), format)


@op("add_rms_norm_to_int8")
def add_rms_norm_to_int8(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, format: RowFormat, wide: bool = False
) -> tuple[QuantizedRows, Tensor]:
    """`quantize_rows` of the norm that `add_rms_norm` gives: (int8 rows of the norm, residual + x)."""
    normed, total = add_rms_norm(x, residual, weight, eps, wide)
    return quantize_rows(normed, format), total


@op("add_rms_norm_to_fp8")
def add_rms_norm_to_fp8(
    x: Tensor | None, residual: Tensor, weight: Tensor, eps: float
) -> tuple[QuantizedRows, Tensor]:
    """The norm of residual + x as fp8 rows with one scale each, and the sum; x None: nothing to add."""
    total = residual if x is None else residual + x
    return quantize_rows_to_fp8(rms_norm(total, weight, eps), RowFormat()), total


@rms_norm.native()
def native_rms_norm(isa: str, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    assert weight.is_contiguous()
    x = unit_stride(x)
    if x.dim() == 2:
        (tokens, size), heads, head_stride = x.shape, 1, 0
    elif x.dim() == 3:
        (tokens, heads, size), head_stride = x.shape, x.stride(1)
    else:
        return native_rms_norm(isa, x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)
    y = empty(*x.shape, dtype=x.dtype)
    native.rms_norm(
        *native_call(isa, x), x.data_ptr(), x.stride(0), head_stride, 0, 0, False, False, weight.data_ptr(),
        size if weight.dim() == 2 else 0, eps, y.data_ptr(), 0, tokens, heads, size, *NO_ROWS,
    )  # fmt: skip
    return y


@rms_norm_to_int8.native()
def native_rms_norm_to_int8(
    isa: str, x: Tensor, weight: Tensor, eps: float, format: RowFormat
) -> QuantizedRows:
    rows = empty_rows(x.shape[0], x.shape[1], format, x.dtype)
    _over_rows(isa, x, None, weight, eps, False, None, rows)
    return rows


@add_rms_norm.native()
def native_add_rms_norm(
    isa: str, x: Tensor, residual: Tensor, weight: Tensor, eps: float, wide: bool = False
) -> tuple[Tensor, Tensor]:
    y = empty(*x.shape, dtype=x.dtype)
    return y, _over_rows(isa, x, residual, weight, eps, wide, y, None)


@add_rms_norm_to_int8.native()
def native_add_rms_norm_to_int8(
    isa: str, x: Tensor, residual: Tensor, weight: Tensor, eps: float, format: RowFormat, wide: bool = False
) -> tuple[QuantizedRows, Tensor]:
    rows = empty_rows(x.shape[0], x.shape[1], format, x.dtype)
    return rows, _over_rows(isa, x, residual, weight, eps, wide, None, rows)


def _over_rows(
    isa: str, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, wide: bool,
    y: Tensor | None, rows: QuantizedRows | None,
) -> Tensor:  # fmt: skip
    """``x [num_tokens, size]``, with ``residual`` the sum of both, to ``y`` or as int8 to ``rows``; return the sum."""
    assert weight.is_contiguous()
    x = total = unit_stride(x)
    other, are_bf16, sums = (0, 0), (False, False), 0
    if residual is not None:
        total, residual = empty(*x.shape, dtype=torch.float32 if wide else x.dtype), unit_stride(residual)
        assert residual.dtype in (x.dtype, total.dtype), (x.dtype, residual.dtype, total.dtype)
        other, sums = rows_at(residual), total.data_ptr()
        are_bf16 = residual.dtype == torch.bfloat16, total.dtype == torch.bfloat16
    native.rms_norm(
        *native_call(isa, x), *rows_at(x), 0, *other, *are_bf16, weight.data_ptr(), 0, eps, address(y), sums,
        x.shape[0], 1, x.shape[1], *(NO_ROWS if rows is None else row_words(rows)),
    )  # fmt: skip
    return total
