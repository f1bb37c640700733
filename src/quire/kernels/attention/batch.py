"""A step as attention sees it: the ragged batch, its cut into tiles of rows, and what a backend plans for it.

A row is a (token, query head of one kv head), token by token: row r of a sequence has the position ``start + r //
group``. A backend may derive more from a batch, once per step and kind of layer; `RaggedBatch.plan` keeps it for the
layers that follow. A backend whose plan must lie on a device cuts it on the host and names its arrays, so that they
are uploaded with the rest of the step (`HostPlan`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quire.kernels.kv_blocks import KvView
from quire.parallel.stripe import Stripe

IntArray = npt.NDArray[np.signedinteger]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Constants of one layer's attention. ``scale`` multiplies q·k, then ``soft_cap`` bends it: cap·tanh(s/cap).
    ``both_ways``: a row sees up to the end of its sequence, not to its own position; in the reference alone.
    """

    num_heads: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    both_ways: bool = False


@dataclass(slots=True)
class RaggedBatch:
    """One cache group's view of a step.

    ``cu_seqlens_q [num_seqs + 1]``, ``seq_lens [num_seqs]`` (KV length after this step), ``block_table
    [num_seqs, max_blocks]``: entries that a sequence does not have, or no longer needs, may be any valid block id.
    ``extents`` = (num_seqs, max_blocks) lie in memory because a native call reads them by address, as it does the rest:
    a recorded step is replayed with all four rewritten in place.
    """

    cu_seqlens_q: npt.NDArray[np.int64]
    seq_lens: npt.NDArray[np.int64]
    block_table: npt.NDArray[np.int64]
    extents: npt.NDArray[np.int64] = field(init=False)
    plans: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.extents = np.array((len(self.seq_lens), self.block_table.shape[1]), np.int64)

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)

    def plan(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """Return what a backend keeps under ``key``: restored from an upload, or made by the first layer that asks."""
        plan: T | None = self.plans.get(key)
        if plan is None:
            plan = self.plans[key] = make()
        return plan


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What a layer's plan depends on; layers of one kind share it."""

    group: int  # query heads per kv head
    window: int | None
    kv: KvView
    sinks: bool = False


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Sizes of a captured step, which its plan is padded to. As many tokens as sequences: every sequence decodes."""

    num_tokens: int
    num_seqs: int
    num_positions: int  # longest context


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """The arrays of a `RaggedBatch` on the device, int32."""

    cu_seqlens_q: Tensor  # [num_seqs + 1]
    seq_lens: Tensor  # [num_seqs]
    block_table: Tensor  # [num_seqs, max_blocks]


@dataclass(frozen=True, slots=True)
class HostPlan:
    """A backend's plan of one batch: ``arrays`` to upload, and ``restore``, which gives a batch the uploaded ones.

    ``restore`` takes the next ``len(arrays)`` tensors, in their order.
    """

    arrays: list[IntArray]
    restore: Callable[[RaggedBatch, DeviceBatch, Iterator[Tensor]], None]


Planner = Callable[[RaggedBatch, StepLimits | None], HostPlan]


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Tiles of up to ``rows`` rows of one sequence each; all int64 ``[num_tiles]``."""

    seq: npt.NDArray[np.int64]
    first_row: npt.NDArray[np.int64]  # within the sequence
    low: npt.NDArray[np.int64]  # first position that any of its rows sees
    # One past the last position that any row sees: causally, its last row. ≤ low: there are none.
    end: npt.NDArray[np.int64]


def cut_rows(
    batch: RaggedBatch, seqs: npt.NDArray[np.int64], *, group: int, rows: int, window: int | None,
    stripe: Stripe | None = None,
) -> RowTiles:  # fmt: skip
    """Cut the rows of the sequences ``seqs``, in numpy, with no loop over tokens or sequences.

    With a ``stripe``, positions are the rank's own numbers.
    """
    q_lens = np.diff(batch.cu_seqlens_q)[seqs]
    start = batch.seq_lens[seqs] - q_lens  # position of the first query
    counts = -(-(q_lens * group) // rows)
    owner = np.repeat(np.arange(len(seqs)), counts)  # [num_tiles]
    first_row = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * rows
    last_row = np.minimum(first_row + rows, q_lens[owner] * group) - 1
    low = np.zeros_like(first_row)
    if window is not None:
        low = np.maximum(start[owner] + first_row // group - window + 1, 0)
    end = start[owner] + last_row // group + 1
    if stripe is not None:
        low, end = stripe.below(low), stripe.below(end)
    return RowTiles(seqs[owner], first_row, low, end)


def padded(array: IntArray, size: int | None, value: int = 0) -> IntArray:
    """Return ``array`` with rows of ``value`` behind it, ``size`` rows in all; as it is where ``size`` is None."""
    if size is None or len(array) == size:
        return array
    assert len(array) < size, (len(array), size)
    out = np.full((size, *array.shape[1:]), value, array.dtype)
    out[: len(array)] = array
    return out
