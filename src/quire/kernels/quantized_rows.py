"""Activations as int8, row by row: the input of a linear with int8 or int4 weights.

    scale = max|x| / 127        q = round(x · (127 / max|x|)), ties to even        sums = Σ q over each group of inputs

in fp32, with one rounding per operation, so every backend has the same bits. ``sums`` are kept because weights are
stored unsigned, or have offsets: Σ (q_w + c)·q_x = Σ q_w·q_x + c·Σ q_x.

Rows for rotated weights are rotated first (`kernels.rotation`), which spreads an outlier over its block.

fp8 rows (`quantize_rows_to_fp8`) have the same form: e4m3 numbers, one scale per row and group, no sums.

A row with |x| < `SMALLEST` everywhere becomes zeros with scale 0. A row with NaN or infinity becomes zeros with scale
NaN, so that every output of it is NaN: a broken row stays visible.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.workspace import empty
from quire.weight_format import RowFormat

SMALLEST = 2.0**-100  # below, 127 / max|x| overflows fp32
STRIDE_ALIGN = 64  # bytes of a cache line, and of a row of an AMX tile


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """``format`` is the weight's (group None: one group). The last group may be short; its missing inputs are zeros."""

    # int8 [num_tokens, row_stride], zeros from in_features on; fp8 [num_tokens, in_features].
    q: Tensor
    scale: Tensor  # fp32 [num_tokens]; fp8: [num_tokens, num_groups]
    sums: Tensor  # int32 [num_tokens, num_groups]; fp8: [num_tokens, 0]
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
    sums = empty(num_tokens, num_groups(in_features, format.group), dtype=torch.int32)
    return QuantizedRows(q, empty(num_tokens, dtype=torch.float32), sums, in_features, format, dtype)


def row_words(rows: QuantizedRows | None) -> tuple[int, int, int, int, int, int]:
    """Return (q, stride, scale, sums, group, rotation), as the bindings take rows to fill; zeros without rows."""
    if rows is None:
        return 0, 0, 0, 0, 0, 0
    group, rotation = rows.format
    return (
        rows.q.data_ptr(), rows.q.stride(0), rows.scale.data_ptr(), rows.sums.data_ptr(), group or 0, rotation or 0
    )  # fmt: skip
