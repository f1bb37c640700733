"""Rows of a table by their indices: token embeddings, the rows that sample, the angles of positions."""

from __future__ import annotations

import torch

from quire.kernels.embedding import native, reference  # noqa: F401  registers both
from quire.kernels.registry import Backend, find

__all__ = ["take_rows"]


def take_rows(table: torch.Tensor, ids: torch.Tensor, *, backend: Backend = "reference") -> torch.Tensor:
    """``table [num_rows, size]``, ``ids [num_tokens]`` int64 → ``[num_tokens, size]``, a copy."""
    y: torch.Tensor = find("take_rows", backend)(table, ids)
    return y
