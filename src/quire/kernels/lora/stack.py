"""The adapters of one linear, slot by slot in the layout of their backend, and which rows of a step use which slot."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.linear.packed import PackedLinear
from quire.kernels.registry import Backend

TILE_ROWS = 16  # rows per tile of a GPU's kernels
RANK_ALIGN = 16  # ranks that lie together in the native layout


@dataclass(frozen=True, slots=True)
class LowRank:
    """One part's adapter: the linear gains ``scale · b a x``."""

    a: torch.Tensor  # [rank, in_features]
    b: torch.Tensor  # [part's out_features, rank]
    scale: float

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
    ranks: torch.Tensor  # int64 [num_slots, parts]; 0: the part is not adapted
    scales: torch.Tensor  # fp32, the same shape
    a: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    b: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    packed: dict[tuple[int, int], tuple[PackedLinear, PackedLinear]] = field(default_factory=dict)


IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """The grouping on a GPU: ``order [num_rows]`` and its tiles, ``[num_tiles, 3]`` (`tiles_of`)."""

    order: torch.Tensor
    tiles: torch.Tensor


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
