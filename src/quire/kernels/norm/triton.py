"""RMSNorm in Triton: one program per row, which stays in registers between the sum of squares and the product.

Bytes: the row read once (with a residual: two, and their sum written), the result written once; bound by memory. Sums
take an order given by the row's length alone, so a row's bits do not depend on the batch.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels import norm
from quire.kernels.quantized_rows import QuantizedRows
from quire.kernels.triton_overlap import follow, launch_options
from quire.kernels.workspace import unit_stride
from quire.weight_format import RowFormat


@norm.rms_norm.version("triton")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows = unit_stride(x if x.dim() == 3 else x.reshape(-1, 1, x.shape[-1]))
    y = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    _launch(rows, None, weight, eps, y, None, None)
    return y.view(x.shape)


@norm.add_rms_norm.version("triton")
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, wide: bool = False
) -> tuple[Tensor, Tensor]:
    assert not wide
    y, total = torch.empty_like(x), torch.empty_like(x)
    _launch(_heads(x), _heads(residual), weight, eps, y.unsqueeze(1), total.unsqueeze(1), None)
    return y, total


@norm.add_rms_norm_to_fp8.version("triton")
def add_rms_norm_to_fp8(
    x: Tensor | None, residual: Tensor, weight: Tensor, eps: float
) -> tuple[QuantizedRows, Tensor]:
    y = torch.empty(residual.shape, dtype=torch.float8_e4m3fn, device=residual.device)
    total = residual if x is None else torch.empty_like(residual)
    scales = torch.empty(residual.shape[0], dtype=torch.float32, device=residual.device)
    other = None if x is None else _heads(x)
    _launch(_heads(residual), other, weight, eps, y.unsqueeze(1), total.unsqueeze(1), scales)
    no_sums = scales.new_empty(len(scales), 0, dtype=torch.int32)
    return QuantizedRows(y, scales.unsqueeze(1), no_sums, y.shape[1], RowFormat(), residual.dtype), total


def _heads(x: Tensor) -> Tensor:
    return unit_stride(x).unsqueeze(1)


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, y: Tensor, total: Tensor | None,
    scales: Tensor | None,
) -> None:  # fmt: skip
    tokens, heads, size = x.shape
    if tokens == 0:
        return
    block = triton.next_power_of_2(size)
    stride = 0 if residual is None else residual.stride(0)
    normalize[(tokens, heads)](
        x, x.stride(0), x.stride(1), x if residual is None else residual, stride,
        weight, size if weight.dim() == 2 else 0, eps, y, x if total is None else total,
        weight if scales is None else scales,
        SIZE=size, BLOCK=block, ADD=residual is not None, FP8=scales is not None,
        num_warps=min(max(block // 512, 1), 16), **launch_options(),
    )  # fmt: skip


@triton.jit
@no_type_check
def normalize(
    x, x_token_stride, x_head_stride, residual, residual_stride, weight, weight_head_stride, eps, y, total, scales,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, FP8: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (token, head). y and total are contiguous ``[tokens, heads, SIZE]``."""
    token, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    column = tl.arange(0, BLOCK)
    mask = column < SIZE
    column_weight = tl.load(weight + head * weight_head_stride + column, mask=mask, other=0.0)
    follow(OVERLAP)
    values = tl.load(x + token * x_token_stride + head * x_head_stride + column, mask=mask, other=0.0).to(
        tl.float32
    )
    place = (token * heads + head) * SIZE + column
    if ADD:
        values += tl.load(residual + token * residual_stride + column, mask=mask, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + place, rounded, mask=mask)
        values = rounded.to(tl.float32)
    mean_square = tl.sum(values * values, 0) / SIZE
    factor = tl.rsqrt(mean_square + eps)
    values = values * factor * column_weight
    if FP8:
        values = values.to(x.dtype.element_ty).to(tl.float32)  # rounded like the output of the norm alone
        largest = tl.max(tl.abs(values), 0)
        used = largest >= 2.0**-100  # see `linear.reference`
        tl.store(scales + token, tl.where(used, tl.div_rn(largest, 448.0), 0.0))
        values *= tl.where(used, tl.div_rn(448.0, tl.where(used, largest, 1.0)), 0.0)
    tl.store(y + place, values.to(y.dtype.element_ty), mask=mask)
