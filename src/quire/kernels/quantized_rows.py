"""Activations as int8, row by row: the input of a linear with int8 or int4 weights.

    scale = max|x| / 127        q = round(x · (127 / max|x|)), ties to even        sums = Σ q over each part of a row

in fp32, with one rounding per operation, so every backend has the same bits. A scale is that of a block of 32 or 64
inputs where weights have groups, otherwise of the whole row (`RowFormat`). ``sums`` are kept because weights are
stored unsigned, or have offsets: Σ (q_w + c)·q_x = Σ q_w·q_x + c·Σ q_x.

Rows for rotated weights are rotated first (`kernels.rotation`), which spreads an outlier over its block.

fp8 rows (`quantize_rows_to_fp8`) have the same form: e4m3 numbers, one scale per row and group, no sums.

A block's scale is cut to 22 bits: then 1.5 · 2²³ times it is exact, with which kernels save a conversion. A block with
|x| < `SMALLEST` everywhere becomes zeros with scale 0. A block with NaN, infinity or |x| ≥ `LARGEST_OF_BLOCK` becomes
zeros with scale NaN, so that every output of its row is NaN: a broken row stays visible.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.workspace import empty
from quire.weight_format import RowFormat

SMALLEST = 2.0**-100  # below, 127 / max|x| overflows fp32
LARGEST_OF_BLOCK = 2.0**100
NO_ROWS = (0,) * 7  # `row_words` without rows
STRIDE_ALIGN = 64  # bytes of a cache line, and of a row of an AMX tile


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """``format`` is that of the weight's rows. The last group may be short; its missing inputs are zeros."""

    # int8 [num_tokens, row_stride], zeros from in_features on; fp8 [num_tokens, in_features].
    q: Tensor
    scale: Tensor  # fp32 [num_tokens, num_blocks]; fp8: [num_tokens, num_groups]
    sums: Tensor  # int32 [num_tokens, num_parts]; fp8: [num_tokens, 0]
    in_features: int
    format: RowFormat
    dtype: torch.dtype  # type before quantization, and of a linear's result

    @property
    def shape(self) -> torch.Size:
        """The shape of the rows that were quantized."""
        return torch.Size((self.q.shape[0], self.in_features))

    @property
    def num_tokens(self) -> int:
        return self.q.shape[0]


def num_groups(in_features: int, group: int | None) -> int:
    return 1 if group is None else -(-in_features // group)


def num_blocks(in_features: int, format: RowFormat) -> int:
    """Return the blocks of a row, those of a short last group included."""
    return num_groups(padded_size(in_features, format.group), format.block)


def scales_of(largest: Tensor, format: RowFormat) -> tuple[Tensor, Tensor]:
    """Return which blocks, or rows, have integers other than zeros, and their scales, from their largest |x|, fp32."""
    scale = largest / 127.0
    finite = torch.isfinite(largest)
    if format.block is not None:
        scale = (scale.view(torch.int32) & ~3).view(torch.float32)
        finite &= largest < LARGEST_OF_BLOCK
    used = finite & (largest >= SMALLEST)
    return used, torch.where(used, scale, torch.where(finite, 0.0, torch.nan))


def part_size(format: RowFormat) -> int | None:
    """Return the inputs whose integers are summed, under one scale of the weights and of the row; None: all."""
    return format.group if format.group is None or format.block is None else min(format.group, format.block)


def num_parts(in_features: int, format: RowFormat) -> int:
    """Return the parts of a row, those of a short last group included."""
    return num_groups(padded_size(in_features, format.group), part_size(format))


def padded_size(in_features: int, group: int | None) -> int:
    """Return the inputs that weights are stored for: a multiple of the group, or of 4."""
    step = group or 4
    return -(-in_features // step) * step


def row_stride(in_features: int, group: int | None) -> int:
    """Return the bytes from row to row: whole lines, but no multiple of 512, which would use few of the cache sets."""
    stride = -(-padded_size(in_features, group) // STRIDE_ALIGN) * STRIDE_ALIGN
    return stride + STRIDE_ALIGN if stride % 512 == 0 else stride


def empty_rows(num_tokens: int, in_features: int, format: RowFormat, dtype: torch.dtype) -> QuantizedRows:
    """Return rows for a native op to fill, padding included."""
    q = empty(num_tokens, row_stride(in_features, format.group), dtype=torch.int8)
    scale = empty(num_tokens, num_blocks(in_features, format), dtype=torch.float32)
    sums = empty(num_tokens, num_parts(in_features, format), dtype=torch.int32)
    return QuantizedRows(q, scale, sums, in_features, format, dtype)


def row_words(rows: QuantizedRows) -> tuple[int, ...]:
    """Return (q, stride, scale, sums, group, rotation, block), as the bindings take rows to fill."""
    words = (rows.q.data_ptr(), rows.q.stride(0), rows.scale.data_ptr(), rows.sums.data_ptr())
    return *words, *(number or 0 for number in rows.format)
