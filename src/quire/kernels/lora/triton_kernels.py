"""The two kernels of `kernels.lora.triton`: A x of a tile's rows, and B of it."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def shrink_rows(
    x, x_stride, a, ranks, order, tiles, low, split_stride, num_inner, per_split, max_rank, rank_blocks,
    ROWS: tl.constexpr, RANKS: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile, part, split and ranks): ``low [splits, rows, parts, max_rank]`` fp32 = A x of the inputs."""
    part, parts = tl.program_id(1), tl.num_programs(1)
    tile = tiles + tl.program_id(0) * 3
    of = tl.load(tile).to(tl.int64) * parts + part
    row, stop = tl.load(tile + 1) + tl.arange(0, ROWS), tl.load(tile + 2)
    split, block = (tl.program_id(2) // rank_blocks).to(tl.int64), tl.program_id(2) % rank_blocks
    rank = block * RANKS + tl.arange(0, RANKS)
    if (tl.load(tile + 1) < stop) & (block * RANKS < tl.load(ranks + of)):
        source = x + tl.load(order + row, mask=row < stop, other=0).to(tl.int64) * x_stride
        acc = tl.zeros((ROWS, RANKS), tl.float32)
        for first in range(split * per_split, (split + 1) * per_split, INNER):
            k = first + tl.arange(0, INNER)
            there = k < num_inner
            x_tile = tl.load(
                source[:, None] + k[None, :], mask=(row < stop)[:, None] & there[None, :], other=0.0
            )
            a_row = a + (of * max_rank + rank) * num_inner
            a_tile = tl.load(a_row[None, :] + k[:, None], mask=there[:, None], other=0.0)
            acc += tl.dot(x_tile, a_tile, input_precision=PRECISION)
        target = (
            low + split * split_stride + (row.to(tl.int64) * parts + part)[:, None] * max_rank + rank[None, :]
        )
        tl.store(target, acc, mask=(row < stop)[:, None])


@triton.jit
def expand_rows(
    low, split_stride, b, ranks, scales, order, tiles, y, y_stride, max_rank, width_0, width_1, width_2,
    ROWS: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile, part, columns): y += B · (scale · low), the latter rounded to B's type."""
    part, parts = tl.program_id(1), tl.num_programs(1)
    tile = tiles + tl.program_id(0) * 3
    slot = tl.load(tile).to(tl.int64)
    row, stop = tl.load(tile + 1) + tl.arange(0, ROWS), tl.load(tile + 2)
    width = tl.where(part == 0, width_0, tl.where(part == 1, width_1, width_2))
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    here = tl.where(part > 0, width_0, 0) + tl.where(part > 1, width_1, 0) + column  # of y
    highest = tl.load(ranks + slot * parts + part)
    if (tl.load(tile + 1) < stop) & (highest > 0) & (tl.program_id(2) * COLUMNS < width):
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, highest, RANKS):
            rank = first + tl.arange(0, RANKS)
            low_row = low + ((row.to(tl.int64) * parts + part) * max_rank)[:, None] + rank[None, :]
            low_tile = tl.zeros((ROWS, RANKS), tl.float32)
            for split in tl.static_range(SPLITS):
                low_tile += tl.load(low_row + split * split_stride, mask=(row < stop)[:, None], other=0.0)
            low_tile = (low_tile * tl.load(scales + slot * parts + part)).to(b.dtype.element_ty)
            b_row = b + (slot * (width_0 + width_1 + width_2) + here) * max_rank
            b_tile = tl.load(b_row[None, :] + rank[:, None], mask=(column < width)[None, :], other=0.0)
            acc += tl.dot(low_tile, b_tile, input_precision=PRECISION)
        target = y + tl.load(order + row, mask=row < stop, other=0).to(tl.int64) * y_stride
        target, mask = target[:, None] + here[None, :], (row < stop)[:, None] & (column < width)[None, :]
        total = tl.load(target, mask=mask, other=0.0).to(tl.float32) + acc
        tl.store(target, total.to(y.dtype.element_ty), mask=mask)
