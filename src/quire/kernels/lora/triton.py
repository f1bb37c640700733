"""Adapters on a GPU: rows sorted by slot in tiles of `ROWS`, A of each tile's adapter, then B, each added to y once.

Bytes: A and B of the adapters that have rows, once a tile. A x is summed in `SPLITS` parts, added in order, so that few
rows occupy some of the GPU. A tile's products are those of its rows alone and in one order: the invariant mode has no
version of its own. Slots lie side by side: ``a [slots, parts, max_rank, inputs]``,
``b [slots, outputs of all parts, max_rank]``; what is beyond an adapter's rank is 0.
"""

from __future__ import annotations

import numpy as np
import torch
import triton

from quire.kernels.lora.rows import AdapterRows, DeviceRows, IntArray
from quire.kernels.lora.stack import LoraStack, LowRank
from quire.kernels.lora.triton_kernels import expand_rows, shrink_rows
from quire.kernels.registry import register

ROWS, RANKS, INNER, COLUMNS, SPLITS = 16, 16, 128, 64, 4
MAX_PARTS = 3


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
def add_lora(x: torch.Tensor, y: torch.Tensor, stack: LoraStack, rows: AdapterRows) -> None:
    there = rows.there or DeviceRows(
        *(torch.from_numpy(part).to(x.device) for part in (rows.order, tiles_of(rows)))
    )
    num_tiles, parts = there.tiles.shape[0], len(stack.widths)
    if num_tiles == 0:
        return
    x = x if x.stride(1) == 1 else x.contiguous()
    assert y.stride(1) == 1
    low = torch.empty(SPLITS, y.shape[0], parts, stack.max_rank, dtype=torch.float32, device=x.device)
    per_split, blocks = (
        triton.cdiv(stack.in_features, INNER * SPLITS) * INNER,
        triton.cdiv(stack.max_rank, RANKS),
    )
    precision = "ieee" if stack.dtype == torch.float32 else "tf32"
    shrink_rows[(num_tiles, parts, SPLITS * blocks)](
        x, x.stride(0), stack.a, stack.ranks, there.order, there.tiles, low, low.stride(0), stack.in_features,
        per_split, stack.max_rank, blocks, ROWS=ROWS, RANKS=RANKS, INNER=INNER, PRECISION=precision, num_warps=4,
    )  # fmt: skip
    expand_rows[(num_tiles, parts, triton.cdiv(max(stack.widths), COLUMNS))](
        low, low.stride(0), stack.b, stack.ranks, stack.scales, there.order, there.tiles, y, y.stride(0),
        stack.max_rank, *stack.widths, *(0,) * (MAX_PARTS - parts), ROWS=ROWS, RANKS=RANKS, COLUMNS=COLUMNS,
        SPLITS=SPLITS, PRECISION=precision, num_warps=4,
    )  # fmt: skip


def tiles_of(rows: AdapterRows) -> IntArray:
    """int64 ``[num_tiles, 3]``: slot from 0 on, first and end place in ``rows.order``."""
    counts = -(-np.diff(rows.starts) // ROWS)
    slot = np.repeat(np.arange(len(counts)), counts)
    first = rows.starts[slot] + (np.arange(len(slot)) - np.repeat(np.cumsum(counts) - counts, counts)) * ROWS
    return np.stack((slot, first, np.minimum(first + ROWS, rows.starts[slot + 1])), axis=1)


def most_tiles(num_rows: int, num_slots: int) -> int:
    """Tiles that so many rows can have: a graph's room."""
    return num_rows // ROWS + num_slots
