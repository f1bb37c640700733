"""Launching `triton_kernels.matmul_tiles` for one matrix: tile sizes, splits of the inputs, and the fold."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from quire.kernels.block_sizes import Sizes
from quire.kernels.linear.packed import PackedLinear
from quire.kernels.linear.triton_kernels import fold_splits, matmul_tiles

ENOUGH = 256  # programs: with fewer tiles than that, the inputs are split too
LEAST_STEPS = 4  # of a split


@dataclass(frozen=True, slots=True)
class Held:
    """How `matmul_tiles` finds a matrix: bits of a weight, inputs a scale is for, strides in elements."""

    kind: int
    group: int
    per_group: bool
    inner: int  # inputs a step's product has; int4 steps have two products
    step: int  # inputs of a step


def held(packed: PackedLinear, inner: int) -> Held:
    """Return how ``packed`` is held; ``inner`` is the wanted inputs a product, where no group fixes them."""
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
    x: torch.Tensor,
    packed: PackedLinear,
    out_dtype: torch.dtype,
    out: torch.Tensor | None,
    sizes: Sizes,
    *,
    row_scale: torch.Tensor | None = None,
    programs: int = ENOUGH,
    fixed_splits: bool = False,
) -> torch.Tensor:
    """``x [num_tokens, in_features]`` → ``[num_tokens, out_features]``.

    ``row_scale``: of fp8 rows, fp32 ``[num_tokens, groups]``.
    ``fixed_splits``: the number of splits depends on the matrix alone, as if there were one tile of rows.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    tokens, columns = x.shape[0], packed.out_features
    y = torch.empty(tokens, columns, dtype=out_dtype, device=x.device) if out is None else out
    if tokens == 0:
        return y
    how = held(packed, sizes["inner"])
    tiles = triton.cdiv(columns, sizes["columns"])
    steps = triton.cdiv(packed.in_features, how.step)
    wanted = programs // (tiles if fixed_splits else tiles * triton.cdiv(tokens, sizes["rows"]))
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
    x: torch.Tensor,
    row_index: torch.Tensor,
    packed: PackedLinear,
    out: torch.Tensor,
    out_stride: int,
    tiles: torch.Tensor,
    num_rows: int,
    how: Held,
    sizes: Sizes,
    steps_per_split: int,
    splits: int,
    experts: ExpertStrides | None,
    row_scale: torch.Tensor | None = None,
) -> None:
    """One launch of the kernel; with ``experts``, ``tiles`` say which rows are whose and ``packed`` is expert 0."""
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
