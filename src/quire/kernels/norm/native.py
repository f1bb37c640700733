"""Native RMSNorm (csrc/cpu/norm_kernel.cpp): one pass for the sum of squares, in an order fixed by the row's length."""

from __future__ import annotations

import torch

from quire.kernels.quantized_rows import QuantizedRows, empty_rows, row_words
from quire.kernels.registry import native, register_native
from quire.kernels.threads import num_native_threads
from quire.kernels.workspace import address, empty


@register_native("rms_norm")
def rms_norm(isa: str, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x [num_tokens, size]`` or ``[num_tokens, num_heads, size]`` → the same shape and dtype."""
    assert weight.is_contiguous()
    if x.stride(-1) != 1 or x.dim() not in (2, 3):
        x = x.contiguous()
    if x.dim() == 2:
        (tokens, size), heads, head_stride = x.shape, 1, 0
    elif x.dim() == 3:
        (tokens, heads, size), head_stride = x.shape, x.stride(1)
    else:
        return rms_norm(isa, x.view(-1, x.shape[-1]), weight, eps).view(x.shape)
    y = empty(*x.shape, dtype=x.dtype)
    native.rms_norm(
        num_native_threads(), isa, x.dtype == torch.bfloat16, x.data_ptr(), x.stride(0), head_stride, 0, 0,
        weight.data_ptr(), size if weight.dim() == 2 else 0, eps, y.data_ptr(), 0, tokens, heads, size,
        *row_words(None),
    )  # fmt: skip
    return y


@register_native("rms_norm_to_int8")
def rms_norm_to_int8(
    isa: str, x: torch.Tensor, weight: torch.Tensor, eps: float, group: int | None
) -> QuantizedRows:
    rows = empty_rows(x.shape[0], x.shape[1], group, x.dtype)
    _over_rows(isa, x, None, weight, eps, None, None, rows)
    return rows


@register_native("add_rms_norm")
def add_rms_norm(
    isa: str, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both ``[num_tokens, size]`` → (normed, sum)."""
    y, total = empty(*x.shape, dtype=x.dtype), empty(*x.shape, dtype=x.dtype)
    _over_rows(isa, x, residual, weight, eps, y, total, None)
    return y, total


@register_native("add_rms_norm_to_int8")
def add_rms_norm_to_int8(
    isa: str, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group: int | None
) -> tuple[QuantizedRows, torch.Tensor]:
    rows, total = empty_rows(x.shape[0], x.shape[1], group, x.dtype), empty(*x.shape, dtype=x.dtype)
    _over_rows(isa, x, residual, weight, eps, None, total, rows)
    return rows, total


def _over_rows(
    isa: str,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    y: torch.Tensor | None,
    total: torch.Tensor | None,
    rows: QuantizedRows | None,
) -> None:
    """``x [num_tokens, size]``, with ``residual`` the sum of both, to ``y`` or as int8 to ``rows``."""
    assert weight.is_contiguous()
    tokens, size = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    if residual is not None:
        assert x.dtype == residual.dtype, (x.dtype, residual.dtype)
        if residual.stride(1) != 1:
            residual = residual.contiguous()
    native.rms_norm(
        num_native_threads(), isa, x.dtype == torch.bfloat16, x.data_ptr(), x.stride(0), 0, address(residual),
        0 if residual is None else residual.stride(0), weight.data_ptr(), 0, eps, address(y), address(total),
        tokens, 1, size, *row_words(rows),
    )  # fmt: skip
