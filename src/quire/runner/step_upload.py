"""A step's numbers on their way to a GPU: one buffer, pinned and double on the host, and one copy a step.

The device's buffer does not move, and its copies are ordered behind the kernels of the step before; the host's are two,
so that the next step is written while the last one is still being copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

_ALIGN = 16  # bytes


class StepUpload:
    """``capacity``: numbers of a step; a larger one makes all buffers anew, and ``generation`` counts that."""

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

    def put(self, arrays: Sequence[npt.NDArray[np.signedinteger]]) -> list[torch.Tensor]:
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
