"""Where native ops put their results: every one allocates with `empty`, so that a recorded step can say where."""

from __future__ import annotations

import torch


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor of the CPU."""
    return torch.empty(shape, dtype=dtype)
