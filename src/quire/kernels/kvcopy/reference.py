"""Page moves in torch: plain copies, so exact."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.kernels.registry import register


@register("copy_pages", "reference")
def copy_pages(storage: torch.Tensor, moves: Sequence[tuple[int, int]]) -> None:
    """In list order; runs of moves that do not read what the run wrote go in one gather and scatter."""
    sources: list[int] = []
    targets: list[int] = []
    written: set[int] = set()
    for source, target in moves:
        if source in written or target in written:
            _copy(storage, sources, targets)
            sources, targets = [], []
            written.clear()
        sources.append(source)
        targets.append(target)
        written.add(target)
    _copy(storage, sources, targets)


def _copy(storage: torch.Tensor, sources: list[int], targets: list[int]) -> None:
    if len(sources) == 1:
        storage[targets[0]].copy_(storage[sources[0]])
    elif sources:
        storage.index_copy_(0, torch.tensor(targets), storage.index_select(0, torch.tensor(sources)))


@register("clear_pages", "reference")
def clear_pages(storage: torch.Tensor, block_ids: torch.Tensor) -> None:
    storage.index_fill_(0, block_ids, 0)
