"""Native adapters (csrc/cpu/lora_kernel.cpp): every slot's A and B as panels of 16 columns, at addresses that stay."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels import huge_pages
from quire.kernels.linear.native import STEP
from quire.kernels.lora import AdapterRows, LoraStack, LowRank
from quire.kernels.registry import native, register_native
from quire.kernels.workspace import call_of, empty, rows_of

COLUMNS = 16  # columns of A and of B that lie together
MAX_PARTS = 3


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@register_native("lora.allocate", takes_level=False)
def allocate(stack: LoraStack) -> None:
    """``a`` has one row per slot and part, ``b`` one per slot with its parts in order; both have room for max_rank."""
    assert len(stack.widths) <= MAX_PARTS, stack.widths
    padded = _round_up(stack.in_features, STEP[stack.dtype])
    rows = stack.num_slots * len(stack.widths)
    columns = sum(_round_up(width, COLUMNS) for width in stack.widths)
    stack.a = huge_pages.zeros(rows, stack.max_rank * padded, dtype=stack.dtype)
    stack.b = huge_pages.zeros(stack.num_slots, stack.max_rank * columns, dtype=stack.dtype)


@register_native("lora.write", takes_level=False)
def write(stack: LoraStack, slot: int, part: int, adapter: LowRank) -> None:
    before = sum(_round_up(width, COLUMNS) for width in stack.widths[:part]) * stack.max_rank
    # The reduced dimension goes last: k of A's ranks, ranks of B's outputs.
    _write_panels(adapter.a, stack.a[slot * len(stack.widths) + part])
    _write_panels(adapter.b, stack.b[slot, before:])


def _write_panels(matrix: Tensor, target: Tensor) -> None:
    """``[columns, k]`` → ``[columns/16, k/step, 16, step]``, filled up with zeros, at the start of ``target``."""
    columns, k = matrix.shape
    step = STEP[target.dtype]
    padded = torch.zeros(_round_up(columns, COLUMNS), _round_up(k, step), dtype=target.dtype)
    padded[:columns, :k] = matrix
    panels = padded.view(-1, COLUMNS, padded.shape[1] // step, step).transpose(1, 2)
    target[: padded.numel()].view(panels.shape).copy_(panels)


@register_native("lora")
def add_lora(isa: str, x: Tensor, y: Tensor, stack: LoraStack, rows: AdapterRows) -> None:
    num_rows, num_parts = y.shape[0], len(stack.widths)
    if num_rows == 0:
        return
    scratch = empty(num_rows, num_parts * stack.max_rank, dtype=stack.dtype)
    native.add_lora(
        *call_of(isa, scratch), *rows_of(x), *rows_of(y), scratch.data_ptr(), stack.a.data_ptr(), stack.b.data_ptr(),
        rows.order.ctypes.data, rows.starts.ctypes.data, stack.ranks.data_ptr(), stack.scales.data_ptr(), num_rows,
        stack.in_features, stack.num_slots, num_parts, stack.max_rank,
        (*stack.widths, *(0,) * (MAX_PARTS - num_parts)),
    )  # fmt: skip
