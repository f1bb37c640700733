"""`PreparedStep` → tensors on a GPU. What attention wants to know of a step is cut here, and all of it is one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.attention import RaggedBatch
from quire.kernels.attention.triton import (
    DeviceBatch,
    DeviceWork,
    most_works,
    num_units,
    plan_works,
    work_key,
)
from quire.kernels.kv_blocks import KvView
from quire.kernels.lora.stack import DeviceRows
from quire.kernels.lora.triton import most_tiles, tiles_of
from quire.layers.step_batch import AdapterBatch, GroupBatch, StepBatch
from quire.modelspec import KvLayout, ModelSpec
from quire.runner.input_batch import PreparedStep
from quire.runner.step_upload import StepUpload

Ints = npt.NDArray[np.signedinteger]


@dataclass(frozen=True, slots=True)
class Room:
    """The sizes of a captured step; the tables have ``width`` blocks. As many tokens as sequences: all decode.

    ``adapted``: rows may have adapters.

    Where a step has fewer, tokens of no sequence fill the rest; they are stored in ``scratch_block``.
    """

    num_tokens: int
    num_seqs: int
    width: int
    scratch_block: int
    adapted: bool


@dataclass(frozen=True, slots=True)
class OnDevice:
    """A step on the device. ``sampling_rows [num_logits]``: rows of `InputBatch` that get a new last id."""

    batch: StepBatch
    sampling_rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Kind:
    """Layers of one kind: what their cut of a step depends on."""

    group: int  # query heads a kv head
    window: int | None
    kv: KvView
    sinks: bool


class DeviceBatches:
    """Makes the tensors of each step."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: KvLayout,
        views: Sequence[KvView],
        device: torch.device,
        *,
        invariant: bool,
    ) -> None:
        self._units = num_units(device)
        self._invariant = invariant
        self._block_size = views[0].block_size
        self.upload = StepUpload(device, torch.int32)
        self._kinds: list[list[_Kind]] = [[] for _ in layout.groups]
        for index, layer in enumerate(spec.layers):
            group = layer.attention.num_heads // views[index].num_kv_heads
            kinds = self._kinds[layout.group_of_layer(index)[0]]
            kind = _Kind(group, layer.attention.window, views[index], layer.attention.sinks)
            if self._key(kind) not in map(self._key, kinds):
                kinds.append(kind)

    def _key(self, kind: _Kind) -> tuple[object, ...]:
        return work_key(kind.kv, kind.group, kind.window, invariant=self._invariant)

    def put(self, step: PreparedStep, room: Room | None = None) -> OnDevice:
        """Upload ``step``, as large as it is or in the sizes of ``room``: then at the same addresses each time."""
        arrays, sizes = self._arrays(step, room)
        views = iter(self.upload.put(arrays))
        input_ids, positions, offsets, logits_indices, rows, cu_seqlens_q, seq_lens = (
            next(views) for _ in range(7)
        )
        groups = []
        for group, works in zip(self._ragged(step), sizes, strict=True):
            slot_blocks, table = next(views), next(views)
            group.plans[("device",)] = DeviceBatch(cu_seqlens_q, seq_lens, table)
            for key, shapes in works:
                group.plans[key] = [
                    DeviceWork(next(views), next(views), *shape, direct) for shape, direct in shapes
                ]
            groups.append(GroupBatch(slot_blocks, offsets, group))
        adapters = step.adapters
        if adapters is not None:
            there = [DeviceRows(next(views), next(views)) for _ in range(2)]
            adapters = AdapterBatch(
                replace(adapters.tokens, there=there[0]), replace(adapters.logits, there=there[1])
            )
        return OnDevice(StepBatch(input_ids, positions, logits_indices, tuple(groups), adapters), rows)

    def _ragged(self, step: PreparedStep) -> list[RaggedBatch]:
        """The step for each cache group, on the host."""
        to, seqs = step.buffers, step.num_seqs
        return [
            RaggedBatch(to.cu_seqlens_q[: seqs + 1], to.seq_lens[:seqs], table[:seqs])
            for table in to.block_tables
        ]

    def _arrays(
        self, step: PreparedStep, room: Room | None
    ) -> tuple[list[Ints], list[list[tuple[tuple[object, ...], list[tuple[tuple[int, int, int], bool]]]]]]:
        """All numbers of the step in order, and for each cache group the shapes of its works."""
        to, tokens, seqs, logits = step.buffers, step.num_tokens, step.num_seqs, len(step.sampling)
        width = -(-step.num_positions // self._block_size) if room is None else room.width
        rows, size = (None, None) if room is None else (room.num_tokens, room.num_seqs)
        arrays = [
            padded(to.input_ids[:tokens], rows),
            padded(to.positions[:tokens], rows),
            padded(to.slot_offsets[:tokens], rows),
            padded(to.logits_indices[:logits], size),
            padded(step.sampling_rows, size),
            padded(to.cu_seqlens_q[: seqs + 1], None if size is None else size + 1, tokens),
            padded(to.seq_lens[:seqs], size),
        ]
        mixed = room is not None and room.num_tokens > room.num_seqs
        sizes = []
        for index, ragged in enumerate(self._ragged(step)):
            scratch = 0 if room is None else room.scratch_block
            arrays.append(padded(to.slot_blocks[index][:tokens], rows, scratch))
            arrays.append(padded(to.block_tables[index][:seqs, :width], size))
            works = []
            for kind in self._kinds[index]:
                cuts = plan_works(
                    ragged, kind.kv, kind.group, kind.window, units=self._units, invariant=self._invariant,
                    mixed=mixed, library=room is None and not kind.sinks,
                )  # fmt: skip
                for (work, _, _), (items, tiles) in zip(
                    cuts, self._most_works(room, kind, len(cuts)), strict=True
                ):
                    arrays += [padded(work.items, items), padded(work.tiles, tiles)]
                works.append((self._key(kind), [(shape, direct) for _, shape, direct in cuts]))
            sizes.append(works)
        adapters = step.adapters
        if adapters is not None:
            for of, count, most in ((adapters.tokens, tokens, rows), (adapters.logits, logits, size)):
                tiles = None if most is None else most_tiles(most, len(of.starts) - 1)
                arrays += [padded(of.order[:count], most), padded(tiles_of(of), tiles)]
        return arrays, sizes

    def _most_works(
        self, room: Room | None, kind: _Kind, count: int
    ) -> Sequence[tuple[int, int] | tuple[None, None]]:
        if room is None:
            return [(None, None)] * count
        return most_works(
            room.num_tokens, room.num_seqs, room.width * self._block_size, kind.kv, kind.group, units=self._units,
            invariant=self._invariant,
        )  # fmt: skip


def padded(array: Ints, size: int | None, value: int = 0) -> Ints:
    """``array`` with rows of ``value`` behind it, ``size`` in all; itself where no size is asked for."""
    if size is None or len(array) == size:
        return array
    assert len(array) < size, (len(array), size)
    whole = np.full((size, *array.shape[1:]), value, array.dtype)
    whole[: len(array)] = array
    return whole
