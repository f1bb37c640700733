"""Page moves on a GPU: torch's gathers and scatters over indices on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.kernels.registry import register


@register("copy_pages", "triton")
def copy_pages(storage: torch.Tensor, moves: Sequence[tuple[int, int]]) -> None:
    """In list order: a move that touches what an earlier one wrote starts a new gather and scatter."""
    pending: list[tuple[int, int]] = []
    written: set[int] = set()
    for source, target in moves:
        if source in written or target in written:
            _copy(storage, pending)
            pending, written = [], set()
        pending.append((source, target))
        written.add(target)
    _copy(storage, pending)


def _copy(storage: torch.Tensor, moves: list[tuple[int, int]]) -> None:
    if moves:
        index = torch.tensor(moves, dtype=torch.int64).to(storage.device)
        storage[index[:, 1]] = storage[index[:, 0]]


@register("clear_pages", "triton")
def clear_pages(storage: torch.Tensor, block_ids: torch.Tensor) -> None:
    storage.view(torch.int8).index_fill_(0, block_ids.to(storage.device), 0)
