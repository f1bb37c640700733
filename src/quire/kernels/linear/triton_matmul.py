"""The matrix product of the GPU's own linears: plain, int8, int4 or fp8 weights, one matrix or one per expert.

    y[m, n] = Σ_k x[m, k] · w[n, k]        w = power[n] · (scale[g, n] · q[n, k] + offset[g, n]),  g = k // group

Bytes at few rows: the weights, once. k goes up in steps of one size, from the same starts for every number of rows, and
splits of k are folded in order, so that a row's sums have one order; how many rows a tile has changes none of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.block_sizes import Sizes
from quire.kernels.linear.packed import PackedLinear
from quire.kernels.workspace import unit_stride

ENOUGH = 256  # programs; with fewer tiles than that, the inputs are split too
LEAST_STEPS = 4  # of a split


@dataclass(frozen=True, slots=True)
class Held:
    """How `matmul_tiles` reads a matrix: bits per weight, inputs per scale, inputs per step."""

    kind: int
    group: int
    per_group: bool
    inner: int  # inputs of a product; int4 steps have two products
    step: int  # inputs of a step


def held(packed: PackedLinear, inner: int) -> Held:
    """Return how ``packed`` is held; ``inner`` is the wanted inputs per product, where no group fixes them."""
    if not packed.format.quantized:
        return Held(16, 1, False, inner, inner)
    group = packed.format.group
    if packed.format.kind == "int4":
        assert group is not None
        return Held(4, group, True, group, 2 * group)
    if group is None:
        return Held(8, 1, False, inner, inner)  # int8, or fp8 with fp8 rows
    return Held(8, group, True, group, group)


def matmul(
    x: Tensor, packed: PackedLinear, out_dtype: torch.dtype, out: Tensor | None, sizes: Sizes, *,
    row_scale: Tensor | None = None, fixed_splits: bool = False,
) -> Tensor:  # fmt: skip
    """``x [num_tokens, in_features]`` → ``[num_tokens, out_features]``.

    ``row_scale``: of fp8 rows, fp32 ``[num_tokens, groups]``.
    ``fixed_splits``: the number of splits depends on the matrix alone, as if there were one tile of rows.
    """
    x = unit_stride(x)
    tokens, columns = x.shape[0], packed.out_features
    y = torch.empty(tokens, columns, dtype=out_dtype, device=x.device) if out is None else out
    if tokens == 0:
        return y
    how = held(packed, sizes["inner"])
    tiles = triton.cdiv(columns, sizes["columns"])
    steps = triton.cdiv(packed.in_features, how.step)
    wanted = ENOUGH // (tiles if fixed_splits else tiles * triton.cdiv(tokens, sizes["rows"]))
    splits = max(1, min(wanted, steps // LEAST_STEPS))
    per_split = triton.cdiv(steps, splits)
    splits = triton.cdiv(steps, per_split)
    target = y
    if splits > 1:
        target = torch.empty(splits, tokens, columns, dtype=torch.float32, device=x.device)
    launch(x, x, packed, target, target.stride(-2), x, tokens, how, sizes, per_split, splits, None, row_scale)
    if splits > 1:
        block = min(1024, triton.next_power_of_2(columns))
        fold_splits[(tokens, triton.cdiv(columns, block))](
            target, x if packed.scale is None else packed.scale, x if packed.bias is None else packed.bias,
            x if row_scale is None else row_scale, y, y.stride(0), tokens, columns, splits, SCALED=how.kind < 16,
            ROW_SCALE=row_scale is not None and not how.per_group, BIAS=packed.bias is not None, COLUMNS=block,
            num_warps=4,
        )  # fmt: skip
    return y


def launch(
    x: Tensor, row_index: Tensor, packed: PackedLinear, out: Tensor, out_stride: int, tiles: Tensor, num_rows: int,
    how: Held, sizes: Sizes, steps_per_split: int, splits: int, experts: ExpertStrides | None,
    row_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """One launch of the kernel; with ``experts``, ``tiles`` map rows to experts and ``packed`` is expert 0."""
    column_tiles = triton.cdiv(packed.out_features, sizes["columns"])
    row_tiles = tiles.shape[0] if experts is not None else triton.cdiv(num_rows, sizes["rows"])
    strides = experts or ExpertStrides(0, 0, 0, 0)
    scale = x if packed.group_scale is None else packed.group_scale
    offset = x if packed.offset is None else packed.offset
    matmul_tiles[(row_tiles * column_tiles, splits)](
        x, x.stride(0), row_index, packed.data, packed.data.stride(0), strides.data, scale, offset, strides.scale,
        x if packed.scale is None else packed.scale, strides.power, x if packed.bias is None else packed.bias,
        strides.bias, x if row_scale is None else row_scale, out, out_stride, tiles, num_rows, packed.out_features,
        packed.in_features, steps_per_split,
        KIND=how.kind, ROW_SCALE=row_scale is not None, GROUP=how.group, PER_GROUP=how.per_group,
        OFFSET=packed.offset is not None, BIAS=packed.bias is not None and splits == 1, GROUPED=experts is not None,
        SPLIT=splits > 1, ROWS=sizes["rows"], COLUMNS=sizes["columns"], INNER=how.inner, TOGETHER=8,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=sizes["warps"], num_stages=sizes["stages"],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ExpertStrides:
    """Elements from one expert's tensors to the next's."""

    data: int
    scale: int
    power: int
    bias: int


@triton.jit
@no_type_check
def matmul_tiles(
    x, x_stride, row_index, w, w_stride, w_expert_stride, scale, offset, scale_expert_stride,
    power, power_expert_stride, bias, bias_expert_stride, row_scale, out, out_stride, tiles, num_rows,
    num_columns, num_inner, steps_per_split,
    KIND: tl.constexpr, ROW_SCALE: tl.constexpr, GROUP: tl.constexpr, PER_GROUP: tl.constexpr, OFFSET: tl.constexpr,
    BIAS: tl.constexpr,
    GROUPED: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    TOGETHER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile of rows and columns, split). KIND: bits per weight; 16 is x's own type.

    GROUPED: ``tiles [num_tiles, 3]`` are (expert, first row, end row), rows of x are taken by ``row_index``.
    ROW_SCALE: x and w are fp8, and ``row_scale [rows of x]`` (PER_GROUP: ``[rows of x, groups]``) multiplies the sums.
    SPLIT: fp32 ``[splits, num_rows, num_columns]`` goes out, without power and bias. int4 bytes hold input j of an even
    group in the low half and of the next group in the high half, so that nothing is shuffled.
    """
    row_tiles, column_tiles = tl.cdiv(num_rows, ROWS), tl.cdiv(num_columns, COLUMNS)
    if GROUPED:
        expert_tile, column_tile = tl.program_id(0) // column_tiles, tl.program_id(0) % column_tiles
        expert = tl.load(tiles + expert_tile * 3).to(tl.int64)
        first_row, end_row = tl.load(tiles + expert_tile * 3 + 1), tl.load(tiles + expert_tile * 3 + 2)
        if first_row >= end_row:
            return
        w += expert * w_expert_stride
        scale += expert * scale_expert_stride
        offset += expert * scale_expert_stride
        power += expert * power_expert_stride
        bias += expert * bias_expert_stride
    else:  # tiles of TOGETHER rows of tiles run one after another over all columns: what they share stays in L2
        per_band = TOGETHER * column_tiles
        band = tl.program_id(0) // per_band
        in_band = tl.minimum(row_tiles - band * TOGETHER, TOGETHER)
        first_row = (band * TOGETHER + (tl.program_id(0) % per_band) % in_band) * ROWS
        column_tile = (tl.program_id(0) % per_band) // in_band
        end_row = num_rows
    row = first_row + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    row_used, column_used = row < end_row, column < num_columns
    source = row
    if GROUPED:
        source = tl.load(row_index + row, mask=row_used, other=0)
    x_row = x + source.to(tl.int64) * x_stride
    w_column = w + column.to(tl.int64) * w_stride
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    row_sums = tl.zeros((ROWS,), tl.float32)
    first_step = tl.program_id(1) * steps_per_split
    for step in range(first_step, first_step + steps_per_split):
        inner = tl.arange(0, INNER)
        if KIND == 4:  # INNER is a group; a step has two
            low_k = step * 2 * INNER + inner
            there = step * 2 * INNER < num_inner
            both = tl.load(
                w_column[None, :] + (step * INNER + inner)[:, None],
                mask=column_used[None, :] & there,
                other=0,
            )
            for half in tl.static_range(2):
                k = low_k + half * INNER
                x_tile = tl.load(
                    x_row[:, None] + k[None, :], mask=row_used[:, None] & (k < num_inner)[None, :], other=0.0
                )
                q = (both >> 4 if half else both & 15).to(tl.int8) - 8
                dot = tl.dot(x_tile, q.to(x_tile.dtype), input_precision=PRECISION)
                group = (step * 2 + half) * num_columns + column
                group_mask = column_used & ((step * 2 + half) * INNER < num_inner)
                acc += dot * tl.load(scale + group, mask=group_mask, other=0.0).to(tl.float32)[None, :]
                if OFFSET:
                    sums = tl.sum(x_tile.to(tl.float32), 1)
                    acc += (
                        sums[:, None]
                        * tl.load(offset + group, mask=group_mask, other=0.0).to(tl.float32)[None, :]
                    )
        else:
            k = step * INNER + inner
            x_tile = tl.load(
                x_row[:, None] + k[None, :], mask=row_used[:, None] & (k < num_inner)[None, :], other=0.0
            )
            w_tile = tl.load(
                w_column[None, :] + k[:, None],
                mask=column_used[None, :] & (k < num_inner)[:, None],
                other=0.0,
            ).to(x_tile.dtype)
            if ROW_SCALE:  # Hopper adds fp8 products in 14 bits, so their sums go to fp32 every 64
                dot = tl.dot(x_tile, w_tile, max_num_imprecise_acc=64)
            else:
                dot = tl.dot(x_tile, w_tile, input_precision=PRECISION)
            if PER_GROUP:
                group = (step * INNER // GROUP) * num_columns + column
                group_mask = column_used & (step * INNER < num_inner)
                if ROW_SCALE:
                    in_row = tl.cdiv(num_inner, GROUP)
                    of_rows = row_scale + source.to(tl.int64) * in_row + step * INNER // GROUP
                    there = row_used & (step * INNER < num_inner)
                    dot *= tl.load(of_rows, mask=there, other=0.0)[:, None]
                acc += dot * tl.load(scale + group, mask=group_mask, other=0.0).to(tl.float32)[None, :]
                if OFFSET:
                    sums = tl.sum(x_tile.to(tl.float32), 1)
                    acc += (
                        sums[:, None]
                        * tl.load(offset + group, mask=group_mask, other=0.0).to(tl.float32)[None, :]
                    )
            else:
                acc += dot
                if OFFSET:
                    row_sums += tl.sum(x_tile.to(tl.float32), 1)
    mask = row_used[:, None] & column_used[None, :]
    if SPLIT:
        if OFFSET and KIND == 8 and not PER_GROUP:
            acc += row_sums[:, None] * tl.load(offset + column, mask=column_used, other=0.0)[None, :]
        out += (tl.program_id(1).to(tl.int64) * num_rows + row[:, None]) * num_columns
        tl.store(out + column[None, :], acc, mask=mask)
    else:
        if OFFSET and KIND == 8 and not PER_GROUP:
            acc += row_sums[:, None] * tl.load(offset + column, mask=column_used, other=0.0)[None, :]
        if KIND < 16:
            acc *= tl.load(power + column, mask=column_used, other=0.0)[None, :]
        if ROW_SCALE and not PER_GROUP:
            acc *= tl.load(row_scale + source, mask=row_used, other=0.0)[:, None]
        if BIAS:
            acc += tl.load(bias + column, mask=column_used, other=0.0).to(tl.float32)[None, :]
        target = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
        tl.store(target, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
@no_type_check
def fold_splits(
    parts, power, bias, row_scale, out, out_stride, num_rows, num_columns, splits,
    SCALED: tl.constexpr, ROW_SCALE: tl.constexpr, BIAS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (row, columns): the splits of k in order, then power and bias."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < num_columns
    acc = tl.zeros((COLUMNS,), tl.float32)
    for split in range(splits):
        acc += tl.load(parts + (split * num_rows + row) * num_columns + column, mask=mask, other=0.0)
    if SCALED:
        acc *= tl.load(power + column, mask=mask, other=0.0)
    if ROW_SCALE:
        acc *= tl.load(row_scale + row)
    if BIAS:
        acc += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + column, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
@no_type_check
def rows_to_fp8(x, x_stride, q, scale, size, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, group): the largest magnitude of its inputs becomes 448. q is ``[rows, size]``."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    inner = tl.arange(0, BLOCK)
    column = group * GROUP + inner
    mask = (inner < GROUP) & (column < size)
    values = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values), 0)
    used = largest >= 2.0**-100  # as `linear.reference`; beyond, 448 / largest is not finite
    tl.store(scale + row * tl.num_programs(1) + group, tl.where(used, tl.div_rn(largest, 448.0), 0.0))
    inverse = tl.where(used, tl.div_rn(448.0, tl.where(used, largest, 1.0)), 0.0)
    tl.store(q + row * size + column, (values * inverse).to(q.dtype.element_ty), mask=mask)
