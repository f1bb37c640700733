"""Native linears with int8 and int4 weights (csrc/cpu/quantized_kernel.cpp): the reference's bits at every level."""

from __future__ import annotations

from functools import partial
from types import ModuleType

import torch

from quire.kernels import huge_pages
from quire.kernels.linear.packed import PackedLinear, QuantizedWeight, storable_scales
from quire.kernels.quantized_rows import QuantizedRows, empty_rows, num_groups
from quire.kernels.registry import NATIVE_LEVELS, register
from quire.kernels.threads import num_native_threads
from quire.kernels.workspace import empty
from quire.weight_format import TWO_LEVEL_BLOCK, WeightFormat

try:
    from quire import _native as native
except ImportError:  # no compiler at install
    native = None  # type: ignore[assignment]

PANEL = 32  # columns that lie together
BITS = {"int8": 8, "int4": 4}


def format_words(format: WeightFormat) -> tuple[int, int, bool]:
    """Return (bits, group or 0, has_offset), as the bindings take a format."""
    return BITS[format.kind], format.group or 0, format.has_offset


def pack_empty(module: ModuleType, out_features: int, in_features: int, format: WeightFormat) -> PackedLinear:
    """uint8 ``[out/32, blocks, block bytes]``; fp32 ``[out]`` scales, of groups the powers of two; whole panels."""
    panels = -(-out_features // PANEL)
    block = module.quantized_block_bytes(*format_words(format), in_features)
    return PackedLinear(
        out_features,
        in_features,
        huge_pages.zeros(
            panels,
            num_groups(in_features, TWO_LEVEL_BLOCK if format.two_level else format.group),
            block,
            dtype=torch.uint8,
        ),
        scale=torch.zeros(panels * PANEL),
        offset=torch.zeros(panels * PANEL) if format.has_offset and format.group is None else None,
    )


def write_rows(module: ModuleType, packed: PackedLinear, start: int, weight: QuantizedWeight) -> None:
    assert packed.scale is not None
    count, in_features = weight.shape
    if count == 0:
        return
    place = slice(start, start + count)
    scale: torch.Tensor | None = None
    offset: torch.Tensor | None = None
    if weight.multiplier is not None:
        packed.scale[place], scale = weight.scale[:, 0], weight.multiplier
    elif packed.format.group is None:
        packed.scale[place] = weight.scale[:, 0]
        if packed.offset is not None and weight.offset is not None:
            packed.offset[place] = weight.offset[:, 0]
    else:
        scale, offset, packed.scale[place] = storable_scales(weight.scale, weight.offset)
    q = weight.q.contiguous()
    module.pack_quantized(
        num_native_threads(),
        *format_words(packed.format),
        q.data_ptr(),
        0 if scale is None else scale.data_ptr(),
        0 if offset is None else offset.data_ptr(),
        count,
        in_features,
        start,
        packed.data.data_ptr(),
    )


def read_rows(module: ModuleType, isa: str, packed: PackedLinear, ids: torch.Tensor) -> torch.Tensor:
    assert packed.scale is not None
    assert ids.dtype == torch.int64, ids.dtype
    assert ids.is_contiguous()
    y = empty(ids.shape[0], packed.in_features, dtype=packed.dtype)
    module.take_quantized_rows(
        num_native_threads(),
        isa,
        *format_words(packed.format),
        packed.data.data_ptr(),
        packed.scale.data_ptr(),
        0 if packed.offset is None else packed.offset.data_ptr(),
        ids.data_ptr(),
        packed.dtype == torch.bfloat16,
        y.data_ptr(),
        *y.shape,
    )
    return y


def quantize_rows(module: ModuleType, isa: str, x: torch.Tensor, group: int | None) -> QuantizedRows:
    num_tokens, in_features = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    rows = empty_rows(num_tokens, in_features, group, x.dtype)
    module.quantize_rows(
        num_native_threads(),
        isa,
        x.dtype == torch.bfloat16,
        x.data_ptr(),
        x.stride(0),
        num_tokens,
        in_features,
        group or 0,
        rows.q.data_ptr(),
        rows.q.stride(0),
        rows.scale.data_ptr(),
        rows.sums.data_ptr(),
    )
    return rows


def linear(
    module: ModuleType,
    isa: str,
    rows: QuantizedRows,
    packed: PackedLinear,
    out: torch.Tensor | None,
) -> torch.Tensor:
    assert packed.scale is not None
    y = empty(rows.num_tokens, packed.out_features, dtype=rows.dtype) if out is None else out
    module.quantized_linear(
        num_native_threads(),
        isa,
        *format_words(packed.format),
        rows.q.data_ptr(),
        rows.q.stride(0),
        rows.scale.data_ptr(),
        rows.sums.data_ptr(),
        packed.data.data_ptr(),
        packed.scale.data_ptr(),
        0 if packed.offset is None else packed.offset.data_ptr(),
        0 if packed.bias is None else packed.bias.data_ptr(),
        rows.dtype == torch.bfloat16,
        y.data_ptr(),
        y.stride(0),
        rows.num_tokens,
        packed.out_features,
        packed.in_features,
    )
    return y


if native is not None and hasattr(native, "quantized_linear"):  # a build older than this source may lack it
    for level in NATIVE_LEVELS:
        if native.has_isa(level):
            register("quantize_rows", level)(partial(quantize_rows, native, level))
            register("quantized_linear", level)(partial(linear, native, level))
            register("quantized_linear.pack_empty", level)(partial(pack_empty, native))
            register("quantized_linear.write_rows", level)(partial(write_rows, native))
            register("quantized_linear.read_rows", level)(partial(read_rows, native, level))
