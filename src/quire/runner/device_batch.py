"""`PreparedStep` → tensors on a GPU. What attention wants to know of a step is cut here, and all of it is one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.attention import DeviceBatch, HostPlan, LayerKind, RaggedBatch, StepLimits, padded, planner
from quire.kernels.kv_blocks import KvView
from quire.kernels.lora import DeviceRows, most_tiles, tiles_of
from quire.kernels.registry import Backend
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


class DeviceBatches:
    """Makes the tensors of each step."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: KvLayout,
        views: Sequence[KvView],
        device: torch.device,
        *,
        backend: Backend,
    ) -> None:
        """``backend``: the attention's."""
        self._block_size = views[0].block_size
        self.upload = StepUpload(device, torch.int32)
        kinds: list[list[LayerKind]] = [[] for _ in layout.groups]
        for index, layer in enumerate(spec.layers):
            heads, kv = layer.attention, views[index]
            kind = LayerKind(heads.num_heads // kv.num_kv_heads, heads.window, kv, heads.sinks)
            kinds[layout.group_of_layer(index)[0]].append(kind)
        self._planners = [planner(of_group, device, backend=backend) for of_group in kinds]

    def put(self, step: PreparedStep, room: Room | None = None) -> OnDevice:
        """Upload ``step``, as large as it is or in the sizes of ``room``: then at the same addresses each time."""
        ragged = self._ragged(step)
        arrays, plans = self._arrays(step, ragged, room)
        views = iter(self.upload.put(arrays))
        input_ids, positions, offsets, logits_indices, rows, cu_seqlens_q, seq_lens = (
            next(views) for _ in range(7)
        )
        groups = []
        for batch, plan in zip(ragged, plans, strict=True):
            slot_blocks, table = next(views), next(views)
            plan.restore(batch, DeviceBatch(cu_seqlens_q, seq_lens, table), views)
            groups.append(GroupBatch(slot_blocks, offsets, batch))
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
        self, step: PreparedStep, batches: Sequence[RaggedBatch], room: Room | None
    ) -> tuple[list[Ints], list[HostPlan]]:
        """All numbers of the step in order, and the plan of attention for each cache group."""
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
        limits = None
        if room is not None:
            limits = StepLimits(room.num_tokens, room.num_seqs, room.width * self._block_size)
        plans = []
        for index, batch in enumerate(batches):
            scratch = 0 if room is None else room.scratch_block
            arrays.append(padded(to.slot_blocks[index][:tokens], rows, scratch))
            arrays.append(padded(to.block_tables[index][:seqs, :width], size))
            plans.append(self._planners[index](batch, limits))
            arrays += plans[-1].arrays
        adapters = step.adapters
        if adapters is not None:
            for of, count, most in ((adapters.tokens, tokens, rows), (adapters.logits, logits, size)):
                tiles = None if most is None else most_tiles(most, len(of.starts) - 1)
                arrays += [padded(of.order[:count], most), padded(tiles_of(of), tiles)]
        return arrays, plans
