"""`PreparedStep` → tensors on a GPU. Attention's plan of a step goes with it, in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.attention import planner
from quire.kernels.attention.batch import DeviceBatch, HostPlan, LayerKind, RaggedBatch, StepLimits, padded
from quire.kernels.kv_blocks import KvView
from quire.kernels.lora import DeviceRows, most_tiles, tiles_of
from quire.kernels.registry import Backend
from quire.kv_layout import KvLayout
from quire.layers.attention import AdapterBatch, GroupBatch, StepBatch
from quire.modelspec import ModelSpec
from quire.runner.input_batch import PreparedStep

Ints = npt.NDArray[np.signedinteger]
_ALIGN = 16  # bytes


@dataclass(frozen=True, slots=True)
class CapturedShape:
    """The sizes of a captured step; the tables have ``width`` blocks. As many tokens as sequences: all decode.

    Where a step has fewer, tokens of no sequence fill the rest; they are stored in ``scratch_block``. ``adapted``:
    tokens may have adapters.
    """

    num_tokens: int
    num_seqs: int
    width: int
    scratch_block: int
    adapted: bool


@dataclass(frozen=True, slots=True)
class OnDevice:
    """A step on the device. ``rows [num_logits]``: those of `WorkerSeqs` that get a new last id."""

    batch: StepBatch
    rows: torch.Tensor


class DeviceBatches:
    """Makes the tensors of each step."""

    def __init__(
        self, spec: ModelSpec, layout: KvLayout, views: Sequence[KvView], device: torch.device, *, backend: Backend
    ) -> None:  # fmt: skip
        """``backend``: the attention's."""
        self._block_size = views[0].block_size
        self.upload = StepUpload(device, torch.int32)
        kinds: list[list[LayerKind]] = [[] for _ in layout.groups]
        attending = [index for index, layer in enumerate(spec.layers) if layer.attn is not None]
        for index, kv in zip(attending, views, strict=True):
            heads = spec.layers[index].attention
            kind = LayerKind(heads.num_heads // kv.num_kv_heads, heads.window, kv, heads.sinks)
            kinds[layout.group_of_layer(index)[0]].append(kind)
        self._planners = [planner.on(backend)(of_group, device) for of_group in kinds]

    def put(self, step: PreparedStep, captured: CapturedShape | None = None) -> OnDevice:
        """Upload ``step``, as large as it is or in the sizes of ``captured``: then at the same addresses each time."""
        ragged = step.buffers.ragged(step.num_seqs)
        arrays, plans = self._arrays(step, ragged, captured)
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
            tokens, logits = (
                replace(group, there=at)
                for group, at in zip((adapters.tokens, adapters.logits), there, strict=True)
            )
            adapters = AdapterBatch(tokens, logits, ends=captured is None)
        return OnDevice(StepBatch(input_ids, positions, logits_indices, tuple(groups), adapters), rows)

    def _arrays(
        self, step: PreparedStep, batches: Sequence[RaggedBatch], captured: CapturedShape | None
    ) -> tuple[list[Ints], list[HostPlan]]:
        """All numbers of the step in order, and the plan of attention for each cache group."""
        to, tokens, seqs, logits = step.buffers, step.num_tokens, step.num_seqs, step.num_logits
        width = -(-step.num_positions // self._block_size) if captured is None else captured.width
        rows, size = (None, None) if captured is None else (captured.num_tokens, captured.num_seqs)
        arrays = [
            padded(to.input_ids[:tokens], rows),
            padded(to.positions[:tokens], rows),
            padded(to.slot_offsets[:tokens], rows),
            padded(to.logits_indices[:logits], size),
            padded(step.rows, size),
            padded(to.cu_seqlens_q[: seqs + 1], None if size is None else size + 1, tokens),
            padded(to.seq_lens[:seqs], size),
        ]
        limits = None
        if captured is not None:
            limits = StepLimits(captured.num_tokens, captured.num_seqs, captured.width * self._block_size)
        plans = []
        for index, batch in enumerate(batches):
            scratch = 0 if captured is None else captured.scratch_block
            arrays.append(padded(to.slot_blocks[index][:tokens], rows, scratch))
            arrays.append(padded(to.block_tables[index][:seqs, :width], size))
            plans.append(self._planners[index](batch, limits))
            arrays += plans[-1].arrays
        adapters = step.adapters
        if adapters is not None:
            for group, count, most in ((adapters.tokens, tokens, rows), (adapters.logits, logits, size)):
                tiles = None if most is None else most_tiles(most, len(group.starts) - 1)
                arrays += [padded(group.order[:count], most), padded(tiles_of(group), tiles)]
        return arrays, plans


class StepUpload:
    """A step's numbers on their way to a GPU: one buffer, pinned and double on the host, and one copy per step.

    The device's buffer does not move, and its copies are ordered behind the kernels of the step before; the host has
    two, so that the next step is written while the last one is still being copied. ``capacity``: numbers of a step; a
    larger one makes all buffers anew, and ``generation`` counts that.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, capacity: int = 1 << 16) -> None:
        self._device = device
        self._dtype = dtype
        self._turn = 0
        self.generation = 0
        self._make(capacity)

    def _make(self, capacity: int) -> None:
        pinned = self._device.type == "cuda"
        self._hosts = [
            torch.empty(capacity, dtype=self._dtype, device="cpu", pin_memory=pinned) for _ in range(2)
        ]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._there = torch.empty(capacity, dtype=self._dtype, device=self._device)

    def put(self, arrays: Sequence[Ints]) -> list[torch.Tensor]:
        """Copy ``arrays``; return them on the device. Arrays of the same sizes always come at the same addresses.

        They hold until the next call; kernels launched before that read them in time.
        """
        align = _ALIGN // self._dtype.itemsize
        sizes = [-(-array.size // align) * align for array in arrays]
        total = sum(sizes)
        if total > self._there.numel():
            self._make(2 * total)
            self.generation += 1
        self._turn ^= 1
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        host = self._hosts[self._turn]
        numbers = host.numpy()
        views, start = [], 0
        for array, size in zip(arrays, sizes, strict=True):
            numbers[start : start + array.size].reshape(array.shape)[...] = array
            views.append(self._there[start : start + array.size].view(array.shape))
            start += size
        self._there[:total].copy_(host[:total], non_blocking=True)
        if self._device.type == "cuda":
            self._copied[self._turn] = recorded_event()
        return views


def recorded_event() -> torch.cuda.Event:
    """An event behind all that the current stream of the GPU has got."""
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
