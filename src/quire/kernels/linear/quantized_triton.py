"""Linears with int8 and int4 weights of a GPU: activations stay as they are (W8A16, W4A16).

    int8   data int8 ``[out, in]``
    int4   data uint8 ``[out, pairs · group]``: byte p · group + j is q + 8 of input j of group 2p, and of 2p + 1 above

Group scales and offsets are fp16 ``[groups, out]`` times a power of two a feature (``scale``, fp32 ``[out]``), which
holds what checkpoints have exactly; with one scale a feature ``scale`` is it, and offsets are fp32 ``[out]``.
Integers are exact in bf16, sums are fp32, and a scale multiplies the sum of its group.
"""

from __future__ import annotations

import torch

from quire.kernels.block_sizes import block_sizes
from quire.kernels.linear.matmul import matmul
from quire.kernels.linear.packed import PackedLinear, QuantizedWeight, storable_scales
from quire.kernels.quantized_rows import num_groups
from quire.kernels.registry import GPU_KERNELS, register
from quire.weight_format import WeightFormat

SMALL = 32  # rows: from more on, the tiles for many rows are taken


def pack_empty(out_features: int, in_features: int, format: WeightFormat) -> PackedLinear:
    assert not format.two_level, "int4 of two levels is for CPUs: `resolve` takes groups of 32"
    groups = num_groups(in_features, format.group)
    if format.kind == "int4":
        assert format.group is not None
        data = torch.full((out_features, -(-groups // 2) * format.group), 0x88, dtype=torch.uint8)
    else:
        data = torch.zeros(out_features, in_features, dtype=torch.int8)
    packed = PackedLinear(out_features, in_features, data, scale=torch.zeros(out_features))
    if format.group is not None:
        packed.group_scale = torch.zeros(groups, out_features, dtype=torch.float16)
        packed.offset = torch.zeros(groups, out_features, dtype=torch.float16) if format.has_offset else None
    elif format.has_offset:
        packed.offset = torch.zeros(out_features)
    return packed


def write_rows(packed: PackedLinear, start: int, weight: QuantizedWeight) -> None:
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


def _pack_int4(weight: QuantizedWeight) -> torch.Tensor:
    group = weight.format.group
    assert group is not None
    rows, in_features = weight.shape
    pairs = -(-in_features // (2 * group))
    nibbles = torch.full((rows, pairs * 2 * group), 8, dtype=torch.uint8)
    nibbles[:, :in_features] = (weight.q + 8).to(torch.uint8)
    halves = nibbles.view(rows, pairs, 2, group)
    return (halves[:, :, 0] | (halves[:, :, 1] << 4)).view(rows, pairs * group)


def read_rows(packed: PackedLinear, ids: torch.Tensor) -> torch.Tensor:
    """Rows of the matrix in the model's dtype."""
    assert packed.scale is not None
    data, group = packed.data.index_select(0, ids), packed.format.group
    if packed.format.kind == "int4":
        assert group is not None
        halves = data.view(len(ids), -1, 1, group)
        data = torch.cat((halves & 15, halves >> 4), dim=2).view(len(ids), -1)[:, : packed.in_features]
        values = data.float() - 8.0
    else:
        values = data.float()
    if packed.group_scale is not None:
        assert group is not None
        repeated = packed.group_scale.index_select(1, ids).t().float().repeat_interleave(group, 1)
        values *= repeated[:, : packed.in_features]
        if packed.offset is not None:
            repeated = packed.offset.index_select(1, ids).t().float().repeat_interleave(group, 1)
            values += repeated[:, : packed.in_features]
    elif packed.offset is not None:
        values += packed.offset.index_select(0, ids).unsqueeze(1)
    return (values * packed.scale.index_select(0, ids).unsqueeze(1)).to(packed.dtype)


@register("quantized_linear", "triton")
def linear(
    x: torch.Tensor, packed: PackedLinear, out_dtype: torch.dtype, out: torch.Tensor | None
) -> torch.Tensor:
    """``x [num_tokens, in_features]`` → ``[num_tokens, out_features]``."""
    size = "small" if x.shape[0] <= SMALL else "large"
    shape = f"{packed.format.kind}_n{packed.out_features}_k{packed.in_features}"
    return matmul(x, packed, out_dtype, out, block_sizes(f"int_linear_{size}", shape))


@register("quantized_linear", "invariant")
def linear_invariant(
    x: torch.Tensor, packed: PackedLinear, out_dtype: torch.dtype, out: torch.Tensor | None
) -> torch.Tensor:
    """The same with tiles of one shape and splits that depend on the matrix alone."""
    return matmul(x, packed, out_dtype, out, block_sizes("matmul_invariant", "all"), fixed_splits=True)


for backend in GPU_KERNELS:
    register("quantized_linear.pack_empty", backend)(pack_empty)
    register("quantized_linear.write_rows", backend)(write_rows)
    register("quantized_linear.read_rows", backend)(read_rows)
