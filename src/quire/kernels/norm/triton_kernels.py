"""The kernel of `kernels.norm.triton`."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def normalize(
    x, x_token_stride, x_head_stride, residual, residual_stride, weight, weight_head_stride, eps, y, total, scales,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Program (token, head). y and total are contiguous ``[tokens, heads, SIZE]``."""
    token, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    column = tl.arange(0, BLOCK)
    mask = column < SIZE
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
    values = values * factor * tl.load(weight + head * weight_head_stride + column, mask=mask, other=0.0)
    if FP8:
        values = values.to(x.dtype.element_ty).to(tl.float32)  # as the norm alone would write it
        largest = tl.max(tl.abs(values), 0)
        used = largest >= 2.0**-100  # as `linear.fp8_reference`
        tl.store(scales + token, tl.where(used, tl.div_rn(largest, 448.0), 0.0))
        values *= tl.where(used, tl.div_rn(448.0, tl.where(used, largest, 1.0)), 0.0)
    tl.store(y + place, values.to(y.dtype.element_ty), mask=mask)
