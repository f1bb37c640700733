"""How a GPU's attention is cut into items, which rows and which keys, and uploaded with the step.

    tile    up to ``rows`` rows of one sequence: one matrix of queries
    item    a tile with a range of positions: what one program computes, for one kv head

                positions →   0        split     2·split    seq_len
        tile 0 of seq 0       [ item 0 | item 1 | item 2 ]           a causal tile ends behind its last row
        tile 1 of seq 0       [ item 3 | item 4 | item 5 | item 6 ]
        tile 0 of seq 1       [ item 7 ]

Splits lie at absolute multiples of ``split``, so a row's keys are cut alike in every batch and chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.attention import flashinfer, planner
from quire.kernels.attention.batch import (
    DeviceBatch,
    HostPlan,
    IntArray,
    LayerKind,
    RaggedBatch,
    StepLimits,
    cut_rows,
    padded,
)
from quire.kernels.block_sizes import block_sizes

# Positions per split of the invariant version: a constant, since it is part of the result.
SPLIT = 512
DECODE_ROWS = 16  # rows of a tile in decode: the least that a matrix unit takes
PROGRAMS_PER_UNIT = 4  # items per multiprocessor, to hide memory latency
LEAST_SPLIT = 128  # positions
WHOLE = 1 << 30  # positions: a split that no context reaches
Array = TypeVar("Array")
DEVICE_BATCH = ("device",)  # the key of a `DeviceBatch` among a batch's plans


@dataclass(frozen=True, slots=True)
class TileShape:
    """Sizes of a program; ``direct``: every tile is one item, written without folding."""

    rows: int
    keys: int
    num_warps: int
    direct: bool
    num_stages: int = 3


@dataclass(frozen=True, slots=True)
class Work(Generic[Array]):
    """``items [num_items, 4]``, ``tiles [num_tiles, 4]``, int32. A row may see nothing of an item.

    An item: sequence, first row, first position, end position. A tile: sequence, first row, first item, items.
    """

    items: Array
    tiles: Array
    shape: TileShape


HostWork = Work[npt.NDArray[np.int32]]
DeviceWork = Work[Tensor]


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """The step for layers of one kind; without ``works`` FlashInfer computes it."""

    works: tuple[DeviceWork, ...] | None


class TritonPlanner:
    """Cuts the steps of one cache group on the host, for each kind of its layers."""

    def __init__(self, layers: Iterable[LayerKind], device: torch.device, *, invariant: bool) -> None:
        self._units = num_units(device)
        self._invariant = invariant
        self._kinds: dict[tuple[Any, ...], LayerKind] = {}
        for kind in layers:
            self._kinds.setdefault(plan_key(kind, invariant=invariant), kind)

    def __call__(self, batch: RaggedBatch, limits: StepLimits | None) -> HostPlan:
        """With ``limits``, arrays have the sizes of a captured step. FlashInfer is in no captured step."""
        arrays: list[IntArray] = []
        shapes: list[tuple[tuple[Any, ...], list[TileShape] | None]] = []
        for key, kind in self._kinds.items():
            works = plan_works(
                batch, kind, units=self._units, invariant=self._invariant,
                mixed=limits is not None and limits.num_tokens > limits.num_seqs,
                library=limits is None and not kind.sinks,
            )  # fmt: skip
            shapes.append((key, None if works is None else [work.shape for work in works]))
            most = None
            if limits is not None:
                most = most_works(kind, limits, units=self._units, invariant=self._invariant)
            for index, work in enumerate(works or ()):
                items, tiles = (None, None) if most is None else most[index]
                arrays += [padded(work.items, items), padded(work.tiles, tiles)]
            assert most is None or len(most) == len(works or ()), (most, works)

        def restore(batch: RaggedBatch, there: DeviceBatch, views: Iterator[Tensor]) -> None:
            batch.plans[DEVICE_BATCH] = there
            for key, of_kind in shapes:
                works = None
                if of_kind is not None:
                    works = tuple(Work(next(views), next(views), shape) for shape in of_kind)
                batch.plans[key] = DevicePlan(works)

        return HostPlan(arrays, restore)


planner.version("triton")(partial(TritonPlanner, invariant=False))
planner.version("invariant")(partial(TritonPlanner, invariant=True))


def device_batch(batch: RaggedBatch, device: torch.device) -> DeviceBatch:
    """Return the arrays on ``device``: those that the runner uploaded, or copies made here."""

    def copied() -> DeviceBatch:
        arrays = (batch.cu_seqlens_q, batch.seq_lens, batch.block_table)
        return DeviceBatch(*(_upload(array.astype(np.int32), device) for array in arrays))

    return batch.plan(DEVICE_BATCH, copied)


def device_plan(batch: RaggedBatch, kind: LayerKind, device: torch.device, *, invariant: bool) -> DevicePlan:
    """Return the plan of layers of ``kind``: as the runner uploaded it, or cut and copied here."""

    def cut() -> DevicePlan:
        works = plan_works(batch, kind, units=num_units(device), invariant=invariant, library=not kind.sinks)
        if works is None:
            return DevicePlan(None)
        return DevicePlan(
            tuple(Work(_upload(w.items, device), _upload(w.tiles, device), w.shape) for w in works)
        )

    return batch.plan(plan_key(kind, invariant=invariant), cut)


def plan_key(kind: LayerKind, *, invariant: bool) -> tuple[Any, ...]:
    """Return the key of the plan of layers of ``kind`` in ``RaggedBatch.plans``."""
    return ("triton", kind.group, kind.window, kind.kv.num_kv_heads, kind.kv.head_dim, invariant)


def plan_works(
    batch: RaggedBatch, kind: LayerKind, *, units: int, invariant: bool, mixed: bool = False, library: bool = False
) -> list[HostWork] | None:  # fmt: skip
    """Return the work of the sequences that decode, and of those that do not; None where FlashInfer computes the step.

    ``mixed``: both, even where one is empty, for a captured step that has both. ``library``: FlashInfer may compute a
    step with prompts.
    """
    q_lens = np.diff(batch.cu_seqlens_q)
    key, group = _shape_key(kind), kind.group
    if invariant:
        sizes, seqs = block_sizes("attention_invariant", "all"), np.flatnonzero(q_lens)
        shape = TileShape(DECODE_ROWS, sizes["keys"], sizes["warps"], False)
        return [cut_work(batch, seqs, kind, shape, SPLIT)] if len(seqs) else []
    works = []
    short = q_lens * group <= DECODE_ROWS
    if len(seqs := np.flatnonzero((q_lens > 0) & short)) or (mixed and group <= DECODE_ROWS):
        sizes = block_sizes("attention_decode", key)
        split = split_for(
            batch.seq_lens[seqs], kv_heads=kind.kv.num_kv_heads, keys=sizes["keys"],
            programs=units * PROGRAMS_PER_UNIT, smallest=LEAST_SPLIT,
        )  # fmt: skip
        works.append(
            cut_work(batch, seqs, kind, TileShape(DECODE_ROWS, sizes["keys"], sizes["warps"], False), split)
        )
    if len(seqs := np.flatnonzero(~short)) or mixed:
        sizes = block_sizes("attention_prefill", key)
        if library and flashinfer.wanted(sizes, kind.kv):
            return None
        shape = TileShape(sizes["rows"], sizes["keys"], sizes["warps"], True, sizes["stages"])
        works.append(cut_work(batch, seqs, kind, shape, WHOLE))
    return works


def most_works(kind: LayerKind, limits: StepLimits, *, units: int, invariant: bool) -> list[tuple[int, int]]:
    """Return (items, tiles) that each of `plan_works` can have at most in a step of ``limits``.

    A step with more tokens than sequences is ``mixed``, and not invariant.
    """
    group, one_each = kind.group, limits.num_tokens == limits.num_seqs

    def tiles(rows: int) -> int:
        if one_each:
            return limits.num_seqs * -(-group // rows)
        return limits.num_tokens * group // rows + limits.num_seqs

    if invariant:
        return [(tiles(DECODE_ROWS) * -(-limits.num_positions // SPLIT), tiles(DECODE_ROWS))]
    works = []
    if group <= DECODE_ROWS:
        most = limits.num_seqs * -(-limits.num_positions // LEAST_SPLIT)
        share = limits.num_seqs + units * PROGRAMS_PER_UNIT // kind.kv.num_kv_heads + 1
        works.append((min(most, share), limits.num_seqs))
    if group > DECODE_ROWS or not one_each:
        works.append((tiles(block_sizes("attention_prefill", _shape_key(kind))["rows"]),) * 2)
    return works


def cut_work(
    batch: RaggedBatch, seqs: npt.NDArray[np.int64], kind: LayerKind, shape: TileShape, split: int
) -> HostWork:
    """Cut the sequences ``seqs``. Items start at multiples of ``shape.keys``, before what is masked."""
    split = split // shape.keys * shape.keys
    tiles = cut_rows(batch, seqs, group=kind.group, rows=shape.rows, window=kind.window)
    first_split = tiles.low // split
    counts = (tiles.end - 1) // split - first_split + 1
    first_item = np.cumsum(counts) - counts
    tile = np.repeat(np.arange(len(counts)), counts)  # [num_items]
    place = (np.arange(len(tile)) - first_item[tile] + first_split[tile]) * split
    begin = np.maximum(place, tiles.low[tile] // shape.keys * shape.keys)
    stop = np.minimum(place + split, tiles.end[tile])
    items = (tiles.seq[tile], tiles.first_row[tile], begin, stop)
    return Work(
        np.stack(items, axis=1).astype(np.int32),
        np.stack((tiles.seq, tiles.first_row, first_item, counts), axis=1).astype(np.int32),
        shape,
    )


def split_for(seq_lens: IntArray, *, kv_heads: int, keys: int, programs: int, smallest: int) -> int:
    """Choose a split so that about ``programs`` programs share the keys, each at least ``smallest`` of them.

    The split depends on the batch, which the faster mode may do and the invariant one may not.
    """
    even = -(-int(seq_lens.sum()) * kv_heads // programs)
    return -(-max(even, smallest, 1) // keys) * keys


def num_units(device: torch.device) -> int:
    """Return the multiprocessors of the device; 1 in the interpreter, where there is nothing to fill."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _shape_key(kind: LayerKind) -> str:
    return f"d{kind.kv.head_dim}_g{kind.group}_b{kind.kv.pieces.dtype.itemsize}"


def _upload(array: npt.NDArray[np.int32], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
