"""Linears of a GPU: plain (cuBLAS), int8 or int4 weights times plain rows (W8A16, W4A16), fp8 times fp8 (W8A8).

Up to 16 rows go through `triton_few` where the GPU's table has sizes for it, because it was faster there.

**Plain.** cuBLAS. For the invariant mode a product with a fixed order of summation, which costs where cuBLAS would
split the inputs by the number of rows or take another instruction. Tiles of 64 and of 128 rows are made of the same
products of 64 rows, and the splits of the inputs depend on the matrix alone.

**Integers.** Activations stay as they are.

    int8   data int8 ``[out, in]``
    int4   data uint8 ``[out, pairs · group]``: byte p · group + j is q + 8 of input j of group 2p, and of 2p + 1 above

Group scales and offsets are fp16 ``[groups, out]`` times a power of two per feature (``scale``, fp32 ``[out]``), which
holds what checkpoints have exactly; with one scale per feature ``scale`` is it, and offsets are fp32 ``[out]``.
Integers are exact in bf16, sums are fp32, and a scale multiplies the sum of its group.

**fp8.** Rows are converted to fp8 in the op. Data is ``[out, in]``. With one scale per feature the product is
`torch._scaled_mm` (cuBLAS, CUTLASS) where the GPU supports it for scales by row and column, else the tiles of
`triton_matmul`; with groups, the blocks of 128 x 128 of DeepSeek-V3, always the tiles: sums of 128 inputs times both
scales are added in fp32. A block's scale is held for each of its rows.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
from torch import Tensor

from quire.kernels.block_sizes import block_sizes
from quire.kernels.linear.packed import HeadMatrices, PackedLinear, QuantizedWeight, storable_scales
from quire.kernels.linear.reference import FP8, dequantize
from quire.kernels.linear.triton_few import few_rows, few_sizes
from quire.kernels.linear.triton_matmul import matmul, rows_to_fp8, tickets
from quire.kernels.quantized_rows import QuantizedRows, num_groups
from quire.kernels.registry import GPU_KERNELS, register
from quire.kernels.triton_overlap import launch_options
from quire.kernels.workspace import unit_stride
from quire.weight_format import RowFormat, WeightFormat


@register("linear.pack_empty", *GPU_KERNELS)
def pack_empty(out_features: int, in_features: int, dtype: torch.dtype) -> PackedLinear:
    """Row-major ``[out_features, in_features]``."""
    packed = PackedLinear(out_features, in_features, torch.zeros(out_features, in_features, dtype=dtype))
    tickets(packed.data.device)
    return packed


@register("linear.write_rows", *GPU_KERNELS)
def write_rows(packed: PackedLinear, start: int, weight: Tensor) -> None:
    packed.data[start : start + weight.shape[0]].copy_(weight)


@register("linear.read_rows", *GPU_KERNELS)
def read_rows(packed: PackedLinear, ids: Tensor) -> Tensor:
    return packed.data.index_select(0, ids)


@register("linear", "triton")
def linear(x: Tensor, packed: PackedLinear, out_dtype: torch.dtype, out: Tensor | None) -> Tensor:
    weight, bias = packed.data.t(), packed.bias
    if sizes := few_sizes(x, packed):
        return few_rows(x, packed, out_dtype, out, sizes)
    if out_dtype == x.dtype:
        return torch.mm(x, weight, out=out) if bias is None else torch.addmm(bias, x, weight, out=out)
    if x.is_cuda:
        y = torch.mm(x, weight, out_dtype=out_dtype)
    else:
        y = torch.mm(x.to(out_dtype), weight.to(out_dtype))
    if bias is not None:
        y += bias
    return y if out is None else out.copy_(y)


@register("linear", "invariant")
def linear_invariant(x: Tensor, packed: PackedLinear, out_dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """The same; a row's bits do not depend on the other rows."""
    sizes = block_sizes("matmul_invariant", "all")
    if x.shape[0] > sizes["rows"]:
        sizes = {**sizes, "rows": 2 * sizes["rows"], "warps": 2 * sizes["warps"]}
    return matmul(x, packed, out_dtype, out, sizes, fixed_splits=True)


@register("head_linear", "triton")
def head_linear(x: Tensor, heads: HeadMatrices, out: Tensor) -> None:
    """``x [num_tokens, num_heads, in_size]`` → ``out [num_tokens, num_heads, out_size]``: one bmm over the heads."""
    assert isinstance(heads.data, Tensor)
    out.copy_(torch.bmm(x.transpose(0, 1), heads.data).transpose(0, 1))


@register("head_linear", "invariant")
def head_linear_invariant(x: Tensor, heads: HeadMatrices, out: Tensor) -> None:
    """Head by head through the product of fixed order."""
    assert isinstance(heads.data, Tensor)
    for head in range(x.shape[1]):
        weight = heads.data[head].t().contiguous()
        one = PackedLinear(heads.out_size, heads.in_size, weight)
        out[:, head] = linear_invariant(x[:, head], one, x.dtype, None)


register("head_linear.pack", *GPU_KERNELS)(Tensor.contiguous)


@register("quantized_linear.pack_empty", *GPU_KERNELS)
def int_pack_empty(out_features: int, in_features: int, format: WeightFormat) -> PackedLinear:
    assert not format.two_level, "int4 of two levels is for CPUs: `resolve` chooses groups of 32"
    assert format.rotation is None, "a GPU multiplies plain rows"
    groups = num_groups(in_features, format.group)
    if format.kind == "int4":
        assert format.group is not None
        data = torch.full((out_features, -(-groups // 2) * format.group), 0x88, dtype=torch.uint8)
    else:
        data = torch.zeros(out_features, in_features, dtype=torch.int8)
    packed = PackedLinear(out_features, in_features, data, scale=torch.zeros(out_features))
    tickets(data.device)
    if format.group is not None:
        packed.group_scale = torch.zeros(groups, out_features, dtype=torch.float16)
        packed.offset = torch.zeros(groups, out_features, dtype=torch.float16) if format.has_offset else None
    elif format.has_offset:
        packed.offset = torch.zeros(out_features)
    return packed


@register("quantized_linear.write_rows", *GPU_KERNELS)
def int_write_rows(packed: PackedLinear, start: int, weight: QuantizedWeight) -> None:
    assert packed.scale is not None
    place = slice(start, start + weight.shape[0])
    packed.data[place].copy_(_pack_int4(weight) if packed.format.kind == "int4" else weight.q)
    if packed.format.group is None:
        packed.scale[place].copy_(weight.scale[:, 0])
        if weight.offset is not None:
            assert packed.offset is not None
            power = torch.where(weight.scale == 0, torch.ones_like(weight.scale), weight.scale)
            packed.scale[place].copy_(power[:, 0])  # the kernel multiplies offsets by it too
            packed.offset[place].copy_((weight.offset / power)[:, 0])
        return
    scale, offset, power = storable_scales(weight.scale, weight.offset)
    assert packed.group_scale is not None
    packed.scale[place].copy_(power)
    packed.group_scale[:, place].copy_(scale.t())
    if offset is not None:
        assert packed.offset is not None
        packed.offset[:, place].copy_(offset.t())


def _pack_int4(weight: QuantizedWeight) -> Tensor:
    group = weight.format.group
    assert group is not None
    rows, in_features = weight.shape
    pairs = -(-in_features // (2 * group))
    nibbles = torch.full((rows, pairs * 2 * group), 8, dtype=torch.uint8, device=weight.q.device)
    nibbles[:, :in_features] = (weight.q + 8).to(torch.uint8)
    halves = nibbles.view(rows, pairs, 2, group)
    return (halves[:, :, 0] | (halves[:, :, 1] << 4)).view(rows, pairs * group)


@register("quantized_linear.read_rows", *GPU_KERNELS)
def int_read_rows(packed: PackedLinear, ids: Tensor) -> Tensor:
    """Rows of the matrix in the model's dtype."""
    assert packed.scale is not None
    data, group = packed.data.index_select(0, ids), packed.format.group
    if packed.format.kind == "int4":
        assert group is not None
        halves = data.view(len(ids), -1, 1, group)
        levels = torch.cat((halves & 15, halves >> 4), dim=2).view(len(ids), -1)
        data = levels[:, : packed.in_features].to(torch.int8) - 8
    offset = packed.offset
    if packed.group_scale is not None:
        scale = packed.group_scale.index_select(1, ids).t().float()
        offset = None if offset is None else offset.index_select(1, ids).t().float()
        values = dequantize(data, scale, offset, group)
    else:
        values = data.float() if offset is None else data.float() + offset.index_select(0, ids).unsqueeze(1)
    return (values * packed.scale.index_select(0, ids).unsqueeze(1)).to(packed.dtype)


@register("quantized_linear", "triton")
def int_linear(x: Tensor, packed: PackedLinear, out_dtype: torch.dtype, out: Tensor | None) -> Tensor:
    if sizes := few_sizes(x, packed):
        return few_rows(x, packed, out_dtype, out, sizes)
    size = "small" if x.shape[0] <= SMALL else "large"
    shape = f"{packed.format.kind}_n{packed.out_features}_k{packed.in_features}"
    return matmul(x, packed, out_dtype, out, block_sizes(f"int_linear_{size}", shape))


@register("quantized_linear", "invariant")
def int_linear_invariant(
    x: Tensor, packed: PackedLinear, out_dtype: torch.dtype, out: Tensor | None
) -> Tensor:
    """The same with tiles of one shape and splits that depend on the matrix alone."""
    return matmul(x, packed, out_dtype, out, block_sizes("matmul_invariant", "all"), fixed_splits=True)


SMALL = 32  # rows, beyond which the tiles for many rows are taken
SCALED_MM = (9, 0)  # compute capability for torch's scales per row and column


@register("quantize_rows_to_fp8", *GPU_KERNELS)
def quantize_rows_to_fp8(x: Tensor, format: RowFormat) -> QuantizedRows:
    x = unit_stride(x)
    (tokens, size), group = x.shape, format.group
    groups = num_groups(size, group)
    q = torch.empty(tokens, size, dtype=FP8, device=x.device)
    scale = torch.empty(tokens, groups, dtype=torch.float32, device=x.device)
    if tokens:
        block = triton.next_power_of_2(group or size)
        rows_to_fp8[(tokens, groups)](
            x, x.stride(0), q, scale, size, GROUP=group or size, BLOCK=block,
            num_warps=min(max(block // 512, 1), 16), **launch_options(),
        )  # fmt: skip
    return QuantizedRows(q, scale, scale.new_empty(tokens, 0, dtype=torch.int32), size, format, x.dtype)


@register("fp8_linear.pack_empty", *GPU_KERNELS)
def fp8_pack_empty(out_features: int, in_features: int, format: WeightFormat) -> PackedLinear:
    data = torch.zeros(out_features, in_features, dtype=FP8)
    packed = PackedLinear(out_features, in_features, data, scale=torch.ones(out_features))
    tickets(data.device)
    if format.group is not None:
        packed.group_scale = torch.zeros(num_groups(in_features, format.group), out_features)
    return packed


@register("fp8_linear.write_rows", *GPU_KERNELS)
def fp8_write_rows(packed: PackedLinear, start: int, weight: QuantizedWeight) -> None:
    assert packed.scale is not None
    place = slice(start, start + weight.shape[0])
    packed.data[place].copy_(weight.q)
    if packed.group_scale is None:
        packed.scale[place].copy_(weight.scale[:, 0])
    else:
        packed.group_scale[:, place].copy_(weight.scale.t())


@register("fp8_linear.read_rows", *GPU_KERNELS)
def fp8_read_rows(packed: PackedLinear, ids: Tensor) -> Tensor:
    """Rows of the matrix in the model's dtype."""
    assert packed.scale is not None
    data, scale = packed.data.view(torch.int8).index_select(0, ids).view(FP8), packed.scale.unsqueeze(0)
    if packed.group_scale is not None:
        scale = packed.group_scale
    return dequantize(data, scale.index_select(1, ids).t(), None, packed.format.group).to(packed.dtype)


@register("fp8_linear", "triton")
def fp8_linear(rows: QuantizedRows, packed: PackedLinear, out: Tensor | None) -> Tensor:
    if sizes := few_sizes(rows.q, packed):
        return few_rows(rows.q, packed, rows.dtype, out, sizes, row_scale=rows.scale)
    if packed.group_scale is None and rows.dtype == torch.bfloat16 and multiplies(packed):
        return scaled_mm(rows, packed, out)
    shape = f"g{packed.format.group or 0}_n{packed.out_features}_k{packed.in_features}"
    sizes = block_sizes("fp8_linear_small" if rows.num_tokens <= SMALL else "fp8_linear_large", shape)
    return matmul(rows.q, packed, rows.dtype, out, sizes, row_scale=rows.scale)


@register("fp8_linear", "invariant")
def fp8_linear_invariant(rows: QuantizedRows, packed: PackedLinear, out: Tensor | None) -> Tensor:
    """The same with tiles of one shape and splits that depend on the matrix alone."""
    sizes = block_sizes("matmul_invariant", "all")
    return matmul(rows.q, packed, rows.dtype, out, sizes, row_scale=rows.scale, fixed_splits=True)


def scaled_mm(rows: QuantizedRows, packed: PackedLinear, out: Tensor | None) -> Tensor:
    """torch's own product, to bf16; the fp32 bias is added to the result."""
    assert packed.scale is not None
    y: Tensor = torch._scaled_mm(
        rows.q, packed.data.t(), scale_a=rows.scale, scale_b=packed.scale.unsqueeze(0), out_dtype=rows.dtype
    )
    if packed.bias is not None:
        y = (y.float() + packed.bias).to(rows.dtype)
    return y if out is None else out.copy_(y)


def multiplies(packed: PackedLinear) -> bool:
    """Whether `torch._scaled_mm` supports the matrix: sizes in sixteens, and a GPU with scales by row and column."""
    in_sixteens = packed.out_features % 16 == 0 and packed.in_features % 16 == 0
    return in_sixteens and packed.data.is_cuda and _capability(packed.data.device) >= SCALED_MM


@lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
