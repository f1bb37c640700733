"""Native RMSNorm (csrc/cpu/norm_kernel.cpp): one pass for the sum of squares, in an order fixed by the row's length."""

from __future__ import annotations

from torch import Tensor

from quire.kernels import norm
from quire.kernels.quantized_rows import QuantizedRows, empty_rows, row_words
from quire.kernels.registry import native
from quire.kernels.workspace import address, call_of, empty, rows_of, unit_stride


@norm.rms_norm.native()
def rms_norm(isa: str, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    assert weight.is_contiguous()
    x = unit_stride(x)
    if x.dim() == 2:
        (tokens, size), heads, head_stride = x.shape, 1, 0
    elif x.dim() == 3:
        (tokens, heads, size), head_stride = x.shape, x.stride(1)
    else:
        return rms_norm(isa, x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)
    y = empty(*x.shape, dtype=x.dtype)
    native.rms_norm(
        *call_of(isa, x), x.data_ptr(), x.stride(0), head_stride, 0, 0, weight.data_ptr(),
        size if weight.dim() == 2 else 0, eps, y.data_ptr(), 0, tokens, heads, size, *row_words(None),
    )  # fmt: skip
    return y


@norm.rms_norm_to_int8.native()
def rms_norm_to_int8(isa: str, x: Tensor, weight: Tensor, eps: float, group: int | None) -> QuantizedRows:
    rows = empty_rows(x.shape[0], x.shape[1], group, x.dtype)
    _over_rows(isa, x, None, weight, eps, None, None, rows)
    return rows


@norm.add_rms_norm.native()
def add_rms_norm(isa: str, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, total = empty(*x.shape, dtype=x.dtype), empty(*x.shape, dtype=x.dtype)
    _over_rows(isa, x, residual, weight, eps, y, total, None)
    return y, total


@norm.add_rms_norm_to_int8.native()
def add_rms_norm_to_int8(
    isa: str, x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: int | None
) -> tuple[QuantizedRows, Tensor]:
    rows, total = empty_rows(x.shape[0], x.shape[1], group, x.dtype), empty(*x.shape, dtype=x.dtype)
    _over_rows(isa, x, residual, weight, eps, None, total, rows)
    return rows, total


def _over_rows(
    isa: str, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float,
    y: Tensor | None, total: Tensor | None, rows: QuantizedRows | None,
) -> None:  # fmt: skip
    """``x [num_tokens, size]``, with ``residual`` the sum of both, to ``y`` or as int8 to ``rows``."""
    assert weight.is_contiguous()
    x, other = unit_stride(x), (0, 0)
    if residual is not None:
        assert x.dtype == residual.dtype, (x.dtype, residual.dtype)
        residual = unit_stride(residual)
        other = rows_of(residual)
    native.rms_norm(
        *call_of(isa, x), *rows_of(x), 0, *other, weight.data_ptr(), 0, eps, address(y), address(total),
        x.shape[0], 1, x.shape[1], *row_words(rows),
    )  # fmt: skip
