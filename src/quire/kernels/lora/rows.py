"""Which rows of a step belong to which adapter, as the kernels read it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """The same on a GPU: ``order [num_rows]`` and tiles of it, ``[num_tiles, 3]`` (kernels/lora/triton.py)."""

    order: torch.Tensor
    tiles: torch.Tensor


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Rows grouped by slot: slot s (from 1 on; 0 is the base model) has ``order[starts[s - 1] : starts[s]]``.

    ``order [num_rows]`` has room for all rows of the step; what lies behind ``starts[-1]`` is not read.
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
