"""Native linears: plain (csrc/cpu/linear_kernel.cpp), and with quantized weights (csrc/cpu/quantized_kernel.cpp).

Weights lie in packed panels of 32 columns, with one order of summation for any number of rows. Quantized products have
the reference's bits at every level.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.linear.packed import (
    HeadMatrices,
    PackedLinear,
    QuantizedWeight,
    powers_of_two,
    storable_scales,
)
from quire.kernels.quantized_rows import QuantizedRows, empty_rows, row_words
from quire.kernels.registry import NATIVE_LEVELS, native, register_native
from quire.kernels.threads import num_native_threads
from quire.kernels.workspace import address, empty, huge_zeros, native_call, rows_at, unit_stride
from quire.weight_format import BITS, RowFormat, WeightFormat

PANEL = 32  # columns that lie together
TYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
STEP = {torch.bfloat16: 2, torch.float32: 1}  # consecutive k of one column that lie together
CODEBOOKS = {"iq4": 1, "fp4": 2}
SCALES = {"half": 0, "nested": 1, "power": 2}


@register_native("linear.pack_empty", NATIVE_LEVELS, takes_level=False)
def pack_empty(out_features: int, in_features: int, dtype: torch.dtype) -> PackedLinear:
    """Zeros as ``[out/32, in/step, 32, step]``, the last panel and an odd last k padded."""
    step = STEP[dtype]
    shape = (-(-out_features // PANEL), -(-in_features // step), PANEL, step)
    return PackedLinear(out_features, in_features, huge_zeros(*shape, dtype=dtype))


@register_native("linear.write_rows", NATIVE_LEVELS, takes_level=False)
def write_rows(packed: PackedLinear, start: int, weight: Tensor) -> None:
    source = weight.to(packed.data.dtype).contiguous()
    native.pack(
        num_native_threads(), TYPES[packed.data.dtype], source.data_ptr(), source.shape[0], source.shape[1], start,
        packed.data.data_ptr(),
    )  # fmt: skip


@register_native("linear.read_rows", NATIVE_LEVELS)
def read_rows(isa: str, packed: PackedLinear, ids: Tensor) -> Tensor:
    assert ids.dtype == torch.int64, ids.dtype
    assert ids.is_contiguous()
    y = empty(ids.shape[0], packed.in_features, dtype=packed.data.dtype)
    # A stride of 0 says that the table is packed.
    native.gather(*native_call(isa, y), packed.data.data_ptr(), 0, ids.data_ptr(), y.data_ptr(), *y.shape)
    return y


@register_native("linear", NATIVE_LEVELS)
def linear(isa: str, x: Tensor, packed: PackedLinear, out_dtype: torch.dtype, out: Tensor | None) -> Tensor:
    dtype = packed.data.dtype
    assert x.dtype == dtype, (x.dtype, dtype)
    num_tokens, in_features = x.shape
    x = unit_stride(x)
    if in_features % STEP[dtype]:  # the kernel reads whole pairs
        x = torch.nn.functional.pad(x, (0, 1))
    y = empty(num_tokens, packed.out_features, dtype=out_dtype) if out is None else out
    native.linear(
        num_native_threads(), isa, TYPES[dtype], *rows_at(x), packed.data.data_ptr(), address(packed.bias), *rows_at(y),
        TYPES[out_dtype], num_tokens, packed.out_features, in_features,
    )  # fmt: skip
    return y


@register_native("head_linear.pack", NATIVE_LEVELS, takes_level=False)
def pack_heads(weight: Tensor) -> list[PackedLinear]:
    """One packed matrix per head of ``[num_heads, in_size, out_size]``."""
    _, in_size, out_size = weight.shape
    matrices = []
    for matrix in weight:
        packed = pack_empty(out_size, in_size, weight.dtype)
        write_rows(packed, 0, matrix.transpose(0, 1).contiguous())
        matrices.append(packed)
    return matrices


@register_native("head_linear", NATIVE_LEVELS)
def head_linear(isa: str, x: Tensor, heads: HeadMatrices, out: Tensor) -> None:
    """The native linear for each head, reading and writing its part of the rows."""
    assert isinstance(heads.data, list)
    for head, packed in enumerate(heads.data):
        linear(isa, x[:, head], packed, x.dtype, out[:, head])


def format_words(format: WeightFormat) -> tuple[int, int, bool]:
    """Return (form, group or 0, has_offset), as the bindings take a format (csrc/cpu/quantized.h)."""
    form = BITS[format.kind] + 16 * CODEBOOKS.get(format.kind, 0) + 64 * SCALES[format.scales]
    return form, format.group or 0, format.has_offset


@register_native("quantized_linear.pack_empty", NATIVE_LEVELS, takes_level=False)
def int_pack_empty(out_features: int, in_features: int, format: WeightFormat) -> PackedLinear:
    """uint8 ``[out/32, panel bytes]``; fp32 ``[out]`` scales, of groups the powers of two; whole panels."""
    panels = -(-out_features // PANEL)
    panel_bytes = native.quantized_panel_bytes(*format_words(format), in_features)
    data, scale = huge_zeros(panels, panel_bytes, dtype=torch.uint8), torch.zeros(panels * PANEL)
    offset = torch.zeros_like(scale) if format.has_offset and format.group is None else None
    return PackedLinear(out_features, in_features, data, scale=scale, offset=offset)


@register_native("quantized_linear.write_rows", NATIVE_LEVELS, takes_level=False)
def int_write_rows(packed: PackedLinear, start: int, weight: QuantizedWeight) -> None:
    assert packed.scale is not None
    count, in_features = weight.shape
    if count == 0:
        return
    place = slice(start, start + count)
    scale: Tensor | None = None
    offset: Tensor | None = None
    outer: tuple[Tensor | None, Tensor | None] = (None, None)
    if packed.format.scales != "half":
        packed.scale[place] = 1.0
    if weight.nested is not None:
        nested = weight.nested.each(Tensor.contiguous)
        scale, offset, outer = nested.scale, nested.offset, (nested.outer_scale, nested.outer_offset)
    elif packed.format.scales == "power":
        scale = powers_of_two(weight.scale)
    elif weight.multiplier is not None:
        packed.scale[place], scale = weight.scale[:, 0], weight.multiplier
    elif packed.format.group is None:
        packed.scale[place] = weight.scale[:, 0]
        if packed.offset is not None and weight.offset is not None:
            packed.offset[place] = weight.offset[:, 0]
    else:
        scale, offset, packed.scale[place] = storable_scales(weight.scale, weight.offset)
    q = weight.q.contiguous()
    native.pack_quantized(
        num_native_threads(), *format_words(packed.format), q.data_ptr(), address(scale), address(offset),
        address(outer[0]), address(outer[1]), count, in_features, start, packed.data.data_ptr(),
    )  # fmt: skip


@register_native("quantized_linear.read_rows", NATIVE_LEVELS)
def int_read_rows(isa: str, packed: PackedLinear, ids: Tensor) -> Tensor:
    assert packed.scale is not None
    assert ids.dtype == torch.int64, ids.dtype
    assert ids.is_contiguous()
    y = empty(ids.shape[0], packed.in_features, dtype=packed.dtype)
    native.take_quantized_rows(
        num_native_threads(), isa, *format_words(packed.format), packed.format.rotation or 0,
        packed.data.data_ptr(), packed.scale.data_ptr(), address(packed.offset), ids.data_ptr(),
        packed.dtype == torch.bfloat16, y.data_ptr(), *y.shape,
    )  # fmt: skip
    return y


@register_native("quantize_rows", NATIVE_LEVELS)
def quantize_rows(isa: str, x: Tensor, format: RowFormat) -> QuantizedRows:
    num_tokens, in_features = x.shape
    x, rows = unit_stride(x), empty_rows(num_tokens, in_features, format, x.dtype)
    native.quantize_rows(*native_call(isa, x), *rows_at(x), num_tokens, in_features, *row_words(rows))
    return rows


@register_native("quantized_linear", NATIVE_LEVELS)
def int_linear(isa: str, rows: QuantizedRows, packed: PackedLinear, out: Tensor | None) -> Tensor:
    assert packed.scale is not None
    y = empty(rows.num_tokens, packed.out_features, dtype=rows.dtype) if out is None else out
    native.quantized_linear(
        num_native_threads(), isa, *format_words(packed.format), *rows_at(rows.q), rows.scale.data_ptr(),
        rows.sums.data_ptr(), packed.data.data_ptr(), packed.scale.data_ptr(), address(packed.offset),
        address(packed.bias), rows.dtype == torch.bfloat16, *rows_at(y), rows.num_tokens, packed.out_features,
        packed.in_features,
    )  # fmt: skip
    return y
