"""Memory of packed weights: zeros in huge pages where the system gives them.

Weights are read from end to end at every step; with 4 KiB pages the address translation of that stream costs 9 … 25 %
of the bandwidth (notes on CPU kernels, section 3; more under a hypervisor). Untouched pages cost no memory.
"""

from __future__ import annotations

import mmap

import torch

HUGE = 2 << 20  # bytes
WORTH = 2 * HUGE  # smaller matrices would waste as much as they gain


def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros that are not touched yet, from an address that is a multiple of 2 MiB where they are large."""
    count = torch.Size(shape).numel()
    size = count * dtype.itemsize
    if size < WORTH or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape)
