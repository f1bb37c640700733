"""The matrix product of a GPU's linears for up to 16 rows: a program has some columns over all inputs.

    y[m, n] = Σ_k x[m, k] · w[n, k]        w = power[n] · (scale[g, n] · q[n, k] + offset[g, n]),  g = k // group

A tile of 16 rows and few columns is work for one warp, so the warps of a program take different inputs: ``chunks``
products of 16 rows lie side by side, and their sums are added at the end. Matrices of a few MB then need no splits of
the inputs over programs (`triton_matmul`), whose sums would go through memory.

Bytes: the weights, once; bound by memory. The order of the sums is the matrix's own, but what lies beyond 16 rows is
multiplied by other kernels, so the invariant mode does not come here.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.block_sizes import DEFAULTS, Sizes, block_sizes
from quire.kernels.linear.packed import PackedLinear
from quire.kernels.linear.reference import FP8
from quire.kernels.linear.triton_matmul import held, int8_to_bf16, levels, prefetch
from quire.kernels.triton_interpreter import interpreting
from quire.kernels.triton_overlap import follow, launch_options
from quire.kernels.workspace import unit_stride

FEW = 16  # rows: the least that a matrix unit takes


def few_sizes(x: Tensor, packed: PackedLinear) -> Sizes | None:
    """Return the sizes with which `few_rows` multiplies these rows, or None where another product does.

    It takes up to 16 rows in bf16 or fp8, of the formats that `block_sizes` names, where the GPU's table says that it
    is faster; not int8 with an offset per feature.
    """
    format = packed.format
    op = f"{format.kind}_few" if format.group is None else f"{format.kind}_g{format.group}_few"
    one_offset = packed.offset is not None and format.group is None
    fits = 0 < x.shape[0] <= FEW and x.dtype in (torch.bfloat16, FP8) and not one_offset
    if not fits or op not in DEFAULTS:
        return None
    sizes = block_sizes(op, f"n{packed.out_features}_k{packed.in_features}")
    return sizes if sizes["columns"] else None


def few_rows(
    x: Tensor, packed: PackedLinear, out_dtype: torch.dtype, out: Tensor | None, sizes: Sizes, *,
    row_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``x [num_tokens, in_features]``, 1 … 16 tokens → ``[num_tokens, out_features]``.

    ``row_scale``: of fp8 rows, fp32 ``[num_tokens, 1]``.
    """
    x = unit_stride(x)
    tokens, columns = x.shape[0], packed.out_features
    y = torch.empty(tokens, columns, dtype=out_dtype, device=x.device) if out is None else out
    how = held(packed, sizes["inner"])
    multiply_few[(triton.cdiv(columns, sizes["columns"]),)](
        x, x.stride(0), packed.data, packed.data.stride(0), x if packed.group_scale is None else packed.group_scale,
        x if packed.offset is None else packed.offset, x if packed.scale is None else packed.scale,
        x if packed.bias is None else packed.bias, x if row_scale is None else row_scale, y, y.stride(0), tokens,
        columns, packed.in_features,
        KIND=how.kind, ROW_SCALE=row_scale is not None, OFFSET=packed.offset is not None,
        BIAS=packed.bias is not None, BITS=not interpreting(), ROWS=FEW, COLUMNS=sizes["columns"], INNER=how.inner,
        CHUNKS=sizes["chunks"], AHEAD=sizes["ahead"], num_warps=sizes["chunks"], num_stages=sizes["stages"],
        **launch_options(),
    )  # fmt: skip
    return y


@triton.jit
@no_type_check
def multiply_few(
    x, x_stride, w, w_stride, scale, offset, power, bias, row_scale, out, out_stride, num_rows, num_columns, num_inner,
    KIND: tl.constexpr, ROW_SCALE: tl.constexpr, OFFSET: tl.constexpr, BIAS: tl.constexpr, BITS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, CHUNKS: tl.constexpr, AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (columns). A step takes CHUNKS chunks of INNER inputs; of int4 a chunk's bytes hold two groups.

    KIND, ROW_SCALE, OFFSET and BITS as in `matmul_tiles`; only int4 has groups, of INNER inputs. AHEAD: lines of 128
    bytes of each column that are fetched before the kernel before has ended.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row, chunk, inner = tl.arange(0, ROWS), tl.arange(0, CHUNKS), tl.arange(0, INNER)
    row_used, column_used = row < num_rows, column < num_columns
    halves: tl.constexpr = 2 if KIND == 4 else 1
    groups = tl.cdiv(num_inner, INNER)
    width = w.dtype.element_ty.primitive_bitwidth // 8  # bytes of an element
    w_column = w + tl.minimum(column, num_columns - 1).to(tl.int64) * w_stride
    if OVERLAP:
        byte = tl.minimum(tl.arange(0, AHEAD) * 128, w_stride * width - 1)
        prefetch(w_column.to(tl.int64)[:, None] + byte[None, :])
    w_tile_at = w_column[None, None, :] + (chunk[:, None] * INNER + inner[None, :])[:, :, None]
    x_row = x + row * x_stride
    acc = tl.zeros((CHUNKS, ROWS, COLUMNS), tl.float32)
    # What a column or a row has is loaded before the products, and groups' scales a step ahead of them.
    if KIND < 16:
        column_power = tl.load(power + column, mask=column_used, other=0.0)
    if BIAS:
        column_bias = tl.load(bias + column, mask=column_used, other=0.0).to(tl.float32)
    if KIND == 4:
        next_low = of_groups(scale, chunk * halves, groups, column, num_columns)
        next_high = of_groups(scale, chunk * halves + 1, groups, column, num_columns)
    follow(OVERLAP)
    if ROW_SCALE:
        of_rows = tl.load(row_scale + row, mask=row_used, other=0.0)
    for step in range(tl.cdiv(groups, halves * CHUNKS)):
        first = (step * CHUNKS + chunk) * halves  # group, of each chunk
        w_tile = tl.load(
            w_tile_at + step * CHUNKS * INNER,
            mask=column_used[None, None, :]
            & (first[:, None] * INNER + inner[None, :] < num_inner)[:, :, None],
            other=0.0,
        )
        if KIND == 4:
            low, high = next_low, next_high
            next_low = of_groups(scale, first + CHUNKS * halves, groups, column, num_columns)
            next_high = of_groups(scale, first + CHUNKS * halves + 1, groups, column, num_columns)
        for half in tl.static_range(halves):
            k = (first + half)[:, None] * INNER + inner[None, :]
            x_tile = tl.load(
                x_row[None, :, None] + k[:, None, :],
                mask=row_used[None, :, None] & (k < num_inner)[:, None, :],
                other=0.0,
            )
            if KIND == 4:
                weights = levels(w_tile, half, x_tile.dtype, BITS)
            elif KIND == 8 and BITS and not ROW_SCALE:
                weights = int8_to_bf16(w_tile)
            else:
                weights = w_tile.to(x_tile.dtype)
            if KIND == 4:
                acc += tl.dot(x_tile, weights) * (high if half else low)[:, None, :]
                if OFFSET:
                    sums = tl.sum(x_tile.to(tl.float32), 2)
                    of_group = of_groups(offset, first + half, groups, column, num_columns)
                    acc += sums[:, :, None] * of_group[:, None, :]
            else:
                acc += tl.dot(x_tile, weights)
    y = tl.sum(acc, 0)
    if KIND < 16:
        y *= column_power[None, :]
    if ROW_SCALE:
        y *= of_rows[:, None]
    if BIAS:
        y += column_bias[None, :]
    target = out + row[:, None] * out_stride + column[None, :]
    tl.store(target, y.to(out.dtype.element_ty), mask=row_used[:, None] & column_used[None, :])


@triton.jit
@no_type_check
def of_groups(values, group, groups, column, num_columns):
    """``values [groups, num_columns]`` of some groups in fp32; 0 beyond."""
    mask = (group < groups)[:, None] & (column < num_columns)[None, :]
    return tl.load(values + group[:, None] * num_columns + column[None, :], mask=mask, other=0.0).to(
        tl.float32
    )
