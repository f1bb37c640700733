"""Adapters in torch: two exact linears (kernels/linear/reference.py) for each part and each slot that has rows."""

from __future__ import annotations

import torch

from quire.kernels.linear.packed import PackedLinear
from quire.kernels.linear.reference import linear, pack_empty, write_rows
from quire.kernels.lora.stack import AdapterRows, LoraStack, LowRank
from quire.kernels.registry import register


@register("lora.allocate", "reference")
def allocate(stack: LoraStack) -> None:
    """Nothing to allocate: matrices are stored when an adapter is written."""


@register("lora.write", "reference")
def write(stack: LoraStack, slot: int, part: int, adapter: LowRank) -> None:
    stack.packed[slot, part] = (_packed(adapter.a, stack.dtype), _packed(adapter.b, stack.dtype))


def _packed(matrix: torch.Tensor, dtype: torch.dtype) -> PackedLinear:
    packed = pack_empty(matrix.shape[0], matrix.shape[1], dtype)
    write_rows(packed, 0, matrix)
    return packed


@register("lora", "reference")
def add_lora(x: torch.Tensor, y: torch.Tensor, stack: LoraStack, rows: AdapterRows) -> None:
    for slot in range(stack.num_slots):
        start, stop = rows.starts[slot : slot + 2].tolist()
        if start == stop:
            continue
        ids = torch.from_numpy(rows.order[start:stop])
        column = 0
        for part, width in enumerate(stack.widths):
            if stack.ranks[slot, part]:
                a, b = stack.packed[slot, part]
                low = linear(x[ids], a, torch.float32, None) * stack.scales[slot, part]
                delta = linear(low.to(stack.dtype), b, torch.float32, None)
                columns = slice(column, column + width)
                y[ids, columns] = (y[ids, columns].float() + delta).to(y.dtype)
            column += width
