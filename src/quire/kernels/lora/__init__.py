"""``y += scale · B A x`` with the adapter of each row (LoRA: Hu et al. 2021, arXiv:2106.09685), many adapters per step.

    stack = stack_empty(widths, in_features, num_slots, max_rank, dtype, backend=...)    # of one linear
    write_slot(stack, 3, {0: LowRank(a, b, scale)})       # part 0 of slot 3; the slot's other parts become empty
    add_lora(x, y, stack, rows)                           # rows: group_rows(slot of each row)

A linear may be several matrices in one (q, k, v); each is a part with a range of y's columns, in order. A row with
slot 0 keeps its y. ``A x`` is summed in fp32, scaled, rounded to the model's type, and ``B`` of that is summed in fp32
and added to y with one rounding; a row's bits depend on the row and its adapter alone, never on other rows or
adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from quire.kernels.lora import native, reference  # noqa: F401  registers both
from quire.kernels.lora.stack import (
    RANK_ALIGN,
    AdapterRows,
    DeviceRows,
    LoraStack,
    LowRank,
    group_rows,
    most_tiles,
    tiles_of,
)
from quire.kernels.registry import Backend, find

__all__ = [
    "AdapterRows", "DeviceRows", "LoraStack", "LowRank", "add_lora", "group_rows", "most_tiles", "stack_empty",
    "tiles_of", "write_slot",
]  # fmt: skip


def stack_empty(
    widths: Sequence[int],
    in_features: int,
    num_slots: int,
    max_rank: int,
    dtype: torch.dtype,
    *,
    backend: Backend,
) -> LoraStack:
    """Return slots 1 … ``num_slots``, all empty. Memory that no adapter was written to costs nothing on a CPU."""
    assert num_slots >= 1
    assert max_rank >= 1
    shape = (num_slots, len(widths))
    stack = LoraStack(
        tuple(widths),
        in_features,
        num_slots,
        -(-max_rank // RANK_ALIGN) * RANK_ALIGN,
        dtype,
        backend,
        ranks=torch.zeros(shape, dtype=torch.int64),
        scales=torch.zeros(shape),
    )
    find("lora.allocate", backend)(stack)
    return stack


def write_slot(stack: LoraStack, slot: int, parts: Mapping[int, LowRank]) -> None:
    """Make ``parts`` (index of a part → its adapter) the whole of ``slot``."""
    assert 1 <= slot <= stack.num_slots, (slot, stack.num_slots)
    stack.ranks[slot - 1] = 0
    for index, part in parts.items():
        assert part.a.shape == (part.rank, stack.in_features), (part.a.shape, stack.in_features)
        assert part.b.shape == (stack.widths[index], part.rank), (part.b.shape, stack.widths[index])
        assert 1 <= part.rank <= stack.max_rank, (part.rank, stack.max_rank)
        find("lora.write", stack.backend)(stack, slot - 1, index, part)
        stack.ranks[slot - 1, index] = part.rank
        stack.scales[slot - 1, index] = part.scale


def add_lora(x: torch.Tensor, y: torch.Tensor, stack: LoraStack, rows: AdapterRows) -> None:
    """Add to ``y [num_rows, sum of the widths]`` in place; ``x [num_rows, in_features]``, both of the stack's dtype."""
    assert x.dtype == y.dtype == stack.dtype, (x.dtype, y.dtype, stack.dtype)
    assert x.shape == (y.shape[0], stack.in_features), (x.shape, y.shape, stack.in_features)
    assert y.shape[1] == sum(stack.widths), (y.shape, stack.widths)
    assert len(rows.starts) == stack.num_slots + 1, (len(rows.starts), stack.num_slots)
    assert len(rows.order) >= y.shape[0], (len(rows.order), y.shape)
    find("lora", stack.backend)(x, y, stack, rows)
