"""Adapters on a GPU: rows sorted by slot in tiles of `TILE_ROWS`; each tile takes A of its adapter, then B.

Bytes: A and B of the adapters that have rows, once per tile. A x is summed in `SPLITS` parts, added in order, so that
few rows still occupy much of the GPU. A tile's products are those of its rows alone and in one order, so the invariant
mode has no version of its own. Slots lie side by side: ``a [slots, parts, max_rank, inputs]``,
``b [slots, outputs of all parts, max_rank]``; what is beyond an adapter's rank is 0.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.lora import MAX_PARTS, TILE_ROWS, AdapterRows, DeviceRows, LoraStack, LowRank, tiles_of
from quire.kernels.registry import register
from quire.kernels.workspace import unit_stride

RANKS, INNER, COLUMNS, SPLITS = 16, 128, 64, 4


@register("lora.allocate", "triton")
def allocate(stack: LoraStack) -> None:
    assert len(stack.widths) <= MAX_PARTS, stack.widths
    slots, parts, device = stack.num_slots, len(stack.widths), stack.ranks.device
    stack.a = torch.zeros(slots, parts, stack.max_rank, stack.in_features, dtype=stack.dtype, device=device)
    stack.b = torch.zeros(slots, sum(stack.widths), stack.max_rank, dtype=stack.dtype, device=device)


@register("lora.write", "triton")
def write(stack: LoraStack, slot: int, part: int, adapter: LowRank) -> None:
    a, start = stack.a[slot, part], sum(stack.widths[:part])
    b = stack.b[slot, start : start + stack.widths[part]]
    a[adapter.rank :], b[:, adapter.rank :] = 0, 0
    a[: adapter.rank], b[:, : adapter.rank] = adapter.a.to(a.device), adapter.b.to(b.device)


@register("lora", "triton")
def add_lora(x: Tensor, y: Tensor, stack: LoraStack, rows: AdapterRows) -> None:
    there = rows.there or DeviceRows(
        *(torch.from_numpy(part).to(x.device) for part in (rows.order, tiles_of(rows)))
    )
    num_tiles, parts = there.tiles.shape[0], len(stack.widths)
    if num_tiles == 0:
        return
    x = unit_stride(x)
    assert y.stride(1) == 1
    low = torch.empty(SPLITS, y.shape[0], parts, stack.max_rank, dtype=torch.float32, device=x.device)
    per_split = triton.cdiv(stack.in_features, INNER * SPLITS) * INNER
    blocks = triton.cdiv(stack.max_rank, RANKS)
    precision = "ieee" if stack.dtype == torch.float32 else "tf32"
    shrink_rows[(num_tiles, parts, SPLITS * blocks)](
        x, x.stride(0), stack.a, stack.ranks, there.order, there.tiles, low, low.stride(0), stack.in_features,
        per_split, stack.max_rank, blocks, ROWS=TILE_ROWS, RANKS=RANKS, INNER=INNER, PRECISION=precision, num_warps=4,
    )  # fmt: skip
    expand_rows[(num_tiles, parts, triton.cdiv(max(stack.widths), COLUMNS))](
        low, low.stride(0), stack.b, stack.ranks, stack.scales, stack.gained, stack.gains, stack.offsets, there.order,
        there.tiles, y, y.stride(0), stack.max_rank, *stack.widths, *(0,) * (MAX_PARTS - parts), ROWS=TILE_ROWS,
        RANKS=RANKS, COLUMNS=COLUMNS, SPLITS=SPLITS, PRECISION=precision, num_warps=4,
    )  # fmt: skip


@triton.jit
@no_type_check
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
@no_type_check
def expand_rows(
    low, split_stride, b, ranks, scales, gained, gains, offsets, order, tiles, y, y_stride, max_rank, width_0, width_1,
    width_2, ROWS: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile, part, columns): y += B · (scale · low), the latter rounded to B's type; a DoRA scales y first."""
    part, parts = tl.program_id(1), tl.num_programs(1)
    tile = tiles + tl.program_id(0) * 3
    slot = tl.load(tile).to(tl.int64)
    row, stop = tl.load(tile + 1) + tl.arange(0, ROWS), tl.load(tile + 2)
    width = tl.where(part == 0, width_0, tl.where(part == 1, width_1, width_2))
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    here = tl.where(part > 0, width_0, 0) + tl.where(part > 1, width_1, 0) + column  # column of y
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
        base = tl.load(target, mask=mask, other=0.0).to(tl.float32)
        if tl.load(gained + slot * parts + part) > 0:
            place = slot * (width_0 + width_1 + width_2) + here
            gain = tl.load(gains + place, mask=column < width, other=0.0)
            base = base * gain[None, :] + tl.load(offsets + place, mask=column < width, other=0.0)[None, :]
        tl.store(target, (base + acc).to(y.dtype.element_ty), mask=mask)
