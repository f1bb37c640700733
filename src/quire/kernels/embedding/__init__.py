"""Rows of the embedding table."""

from __future__ import annotations

import torch

from quire.kernels.embedding import reference  # noqa: F401  registers
from quire.kernels.registry import Backend, find

__all__ = ["embedding"]


def embedding(
    input_ids: torch.Tensor, table: torch.Tensor, scale: float, *, backend: Backend = "reference"
) -> torch.Tensor:
    """``input_ids [num_tokens]`` int64, ``table [vocab_size, hidden_size]`` → ``[num_tokens, hidden_size]``.

    ``scale`` multiplies the rows (Gemma, Granite), rounded to the table's dtype first, as the models were trained.
    """
    y: torch.Tensor = find("embedding", backend)(input_ids, table, scale)
    return y
