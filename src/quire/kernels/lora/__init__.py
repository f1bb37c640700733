"""``y += scale · B A x`` with the adapter of each row (LoRA: Hu et al. 2021, arXiv:2106.09685), many adapters per step.

    stack = stack_empty(widths, in_features, num_slots, max_rank, dtype, backend=...)    # of one linear
    write_slot(stack, 3, {0: LowRank(a, b, scale)})       # part 0 of slot 3; the slot's other parts become empty
    add_lora(x, y, stack, rows)                           # rows: group_rows(slot of each row)

A linear may be several matrices in one (q, k, v); each is a part with a range of y's columns, in order. A row with
slot 0 keeps its y. ``A x`` is summed in fp32, scaled, rounded to the model's type, and ``B`` of that is summed in fp32
and added to y with one rounding; a row's bits depend on the row and its adapter alone, never on other rows or
adapters.

DoRA (Liu et al. 2024, arXiv:2402.09353) also scales the linear's own product: ``y = gain · y + offset`` per column,
before the rest is added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.linear.native import STEP
from quire.kernels.linear.packed import PackedLinear
from quire.kernels.linear.reference import linear, pack_empty, write_rows
from quire.kernels.registry import Backend, find, native, register, register_native
from quire.kernels.workspace import empty, huge_zeros, native_call, rows_at
from quire.weight_plan import RANK_ALIGN

TILE_ROWS = 16  # rows per tile of a GPU's kernels


@dataclass(frozen=True, slots=True)
class LowRank:
    """One part's adapter: the linear gains ``scale · b a x``; of a DoRA ``b`` has the gain in it."""

    a: Tensor  # [rank, in_features]
    b: Tensor  # [part's out_features, rank]
    scale: float
    gain: Tensor | None = None  # fp32 [part's out_features]; None: no DoRA
    offset: Tensor | None = None  # the same shape; None: 0

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(slots=True)
class LoraStack:
    """``widths``: output features of each part of the linear. ``a``, ``b`` and ``packed`` are the backend's own."""

    widths: tuple[int, ...]
    in_features: int
    num_slots: int
    max_rank: int  # a multiple of RANK_ALIGN
    dtype: torch.dtype
    backend: Backend
    ranks: Tensor  # int64 [num_slots, parts]; 0: the part is not adapted
    scales: Tensor  # fp32, the same shape
    gained: Tensor  # int64, the same shape; 0: no DoRA
    gains: Tensor  # fp32 [num_slots, sum of the widths]
    offsets: Tensor  # the same shape
    a: Tensor = field(default_factory=lambda: torch.empty(0))
    b: Tensor = field(default_factory=lambda: torch.empty(0))
    packed: dict[tuple[int, int], tuple[PackedLinear, PackedLinear]] = field(default_factory=dict)


IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """The grouping on a GPU: ``order [num_rows]`` and its tiles, ``[num_tiles, 3]`` (`tiles_of`)."""

    order: Tensor
    tiles: Tensor


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Rows grouped by slot: slot s (from 1 on; 0 is the base model) has ``order[starts[s - 1] : starts[s]]``.

    ``order [num_rows]`` has room for all rows of the step; entries from ``starts[-1]`` on are not read.
    """

    order: IntArray
    starts: IntArray  # [num_slots + 1]
    there: DeviceRows | None = None  # where the runner uploaded it

    def group(self, slots: IntArray) -> None:
        """Write the grouping of rows whose slots are ``slots [num_rows]``."""
        num_slots = len(self.starts) - 1
        counts = np.bincount(slots, minlength=num_slots + 1)
        self.starts[0] = 0
        np.cumsum(counts[1:], out=self.starts[1:])
        num_adapted = int(self.starts[-1])
        if num_adapted:
            self.order[:num_adapted] = np.argsort(slots, kind="stable")[counts[0] :]

    def take(self, indices: IntArray) -> AdapterRows:
        """Return the grouping of the rows ``indices`` of these, in memory of its own."""
        num_slots = len(self.starts) - 1
        slots = np.zeros(len(self.order), np.int64)
        slots[self.order[: self.starts[-1]]] = np.repeat(np.arange(1, num_slots + 1), np.diff(self.starts))
        return group_rows(slots[indices], num_slots)


def stack_empty(
    widths: Sequence[int], in_features: int, num_slots: int, max_rank: int, dtype: torch.dtype, *, backend: Backend
) -> LoraStack:  # fmt: skip
    """Return slots 1 … ``num_slots``, all empty. Memory that no adapter was written to costs nothing on a CPU."""
    assert num_slots >= 1
    assert max_rank >= 1
    shape = (num_slots, len(widths))
    most = -(-max_rank // RANK_ALIGN) * RANK_ALIGN
    ranks, gained = torch.zeros(2, *shape, dtype=torch.int64)
    gains, offsets = torch.zeros(2, num_slots, sum(widths))
    stack = LoraStack(
        tuple(widths), in_features, num_slots, most, dtype, backend, ranks, torch.zeros(shape), gained, gains, offsets
    )  # fmt: skip
    find("lora.allocate", backend)(stack)
    return stack


def write_slot(stack: LoraStack, slot: int, parts: Mapping[int, LowRank]) -> None:
    """Make ``parts`` (index of a part → its adapter) the whole of ``slot``."""
    assert 1 <= slot <= stack.num_slots, (slot, stack.num_slots)
    stack.ranks[slot - 1] = stack.gained[slot - 1] = 0
    for index, part in parts.items():
        assert part.a.shape == (part.rank, stack.in_features), (part.a.shape, stack.in_features)
        assert part.b.shape == (stack.widths[index], part.rank), (part.b.shape, stack.widths[index])
        assert 1 <= part.rank <= stack.max_rank, (part.rank, stack.max_rank)
        find("lora.write", stack.backend)(stack, slot - 1, index, part)
        stack.ranks[slot - 1, index] = part.rank
        stack.scales[slot - 1, index] = part.scale
        if part.gain is not None:
            columns = slice(sum(stack.widths[:index]), sum(stack.widths[: index + 1]))
            stack.gains[slot - 1, columns] = part.gain.to(stack.gains.device)
            stack.offsets[slot - 1, columns] = (
                0.0 if part.offset is None else part.offset.to(stack.gains.device)
            )
            stack.gained[slot - 1, index] = 1


def add_lora(x: Tensor, y: Tensor, stack: LoraStack, rows: AdapterRows) -> None:
    """Add to ``y [num_rows, sum of the widths]`` in place; ``x [num_rows, in_features]``, both of the stack's dtype."""
    assert x.dtype == y.dtype == stack.dtype, (x.dtype, y.dtype, stack.dtype)
    assert x.shape == (y.shape[0], stack.in_features), (x.shape, y.shape, stack.in_features)
    assert y.shape[1] == sum(stack.widths), (y.shape, stack.widths)
    assert len(rows.starts) == stack.num_slots + 1, (len(rows.starts), stack.num_slots)
    assert len(rows.order) >= y.shape[0], (len(rows.order), y.shape)
    find("lora", stack.backend)(x, y, stack, rows)


@register("lora.allocate", "reference")
def _allocate(stack: LoraStack) -> None:
    """Nothing to allocate: matrices are stored when an adapter is written."""


@register("lora.write", "reference")
def _write(stack: LoraStack, slot: int, part: int, adapter: LowRank) -> None:
    stack.packed[slot, part] = (_packed(adapter.a, stack.dtype), _packed(adapter.b, stack.dtype))


def _packed(matrix: Tensor, dtype: torch.dtype) -> PackedLinear:
    packed = pack_empty(matrix.shape[0], matrix.shape[1], dtype)
    write_rows(packed, 0, matrix)
    return packed


@register("lora", "reference")
def _add_lora(x: Tensor, y: Tensor, stack: LoraStack, rows: AdapterRows) -> None:
    """Two exact linears (kernels/linear/reference.py) for each part and each slot that has rows."""
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
                base = y[ids, columns].float()
                if stack.gained[slot, part]:
                    base = base * stack.gains[slot, columns] + stack.offsets[slot, columns]
                y[ids, columns] = (base + delta).to(y.dtype)
            column += width


def group_rows(slots: IntArray, num_slots: int) -> AdapterRows:
    """Return the grouping of rows with ``slots [num_rows]``, in memory of its own."""
    rows = AdapterRows(np.zeros(len(slots), np.int64), np.zeros(num_slots + 1, np.int64))
    rows.group(slots)
    return rows


def tiles_of(rows: AdapterRows) -> IntArray:
    """Return int64 ``[num_tiles, 3]``: slot from 0 on, first and end place in ``rows.order``."""
    counts = -(-np.diff(rows.starts) // TILE_ROWS)
    slot = np.repeat(np.arange(len(counts)), counts)
    first = (
        rows.starts[slot] + (np.arange(len(slot)) - np.repeat(np.cumsum(counts) - counts, counts)) * TILE_ROWS
    )
    return np.stack((slot, first, np.minimum(first + TILE_ROWS, rows.starts[slot + 1])), axis=1)


def most_tiles(num_rows: int, num_slots: int) -> int:
    """Return how many tiles so many rows can have at most."""
    return num_rows // TILE_ROWS + num_slots


COLUMNS = 16  # columns of A and of B that lie together
MAX_PARTS = 3


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@register_native("lora.allocate", takes_level=False)
def native_allocate(stack: LoraStack) -> None:
    """``a`` has one row per slot and part, ``b`` one per slot with its parts in order; both have room for max_rank."""
    assert len(stack.widths) <= MAX_PARTS, stack.widths
    padded = _round_up(stack.in_features, STEP[stack.dtype])
    rows = stack.num_slots * len(stack.widths)
    columns = sum(_round_up(width, COLUMNS) for width in stack.widths)
    stack.a = huge_zeros(rows, stack.max_rank * padded, dtype=stack.dtype)
    stack.b = huge_zeros(stack.num_slots, stack.max_rank * columns, dtype=stack.dtype)


@register_native("lora.write", takes_level=False)
def native_write(stack: LoraStack, slot: int, part: int, adapter: LowRank) -> None:
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
def native_add_lora(isa: str, x: Tensor, y: Tensor, stack: LoraStack, rows: AdapterRows) -> None:
    num_rows, num_parts = y.shape[0], len(stack.widths)
    if num_rows == 0:
        return
    scratch = empty(num_rows, num_parts * stack.max_rank, dtype=stack.dtype)
    native.add_lora(
        *native_call(isa, scratch), *rows_at(x), *rows_at(y), scratch.data_ptr(), stack.a.data_ptr(),
        stack.b.data_ptr(), rows.order.ctypes.data, rows.starts.ctypes.data, stack.ranks.data_ptr(),
        stack.scales.data_ptr(), stack.gained.data_ptr(), stack.gains.data_ptr(),
        stack.offsets.data_ptr(), num_rows, stack.in_features, stack.num_slots, num_parts,
        stack.max_rank, (*stack.widths, *(0,) * (MAX_PARTS - num_parts)),
    )  # fmt: skip
