"""What ranks that share a sequence's cache have of the rows of a large step (`layers.context`)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.layers.attention import StepBatch
from quire.layers.context import ContextParallel


def own_rows(
    cp: ContextParallel, batch: StepBatch, entering: tuple[Tensor, ...] | None
) -> tuple[StepBatch, tuple[Tensor, ...] | None]:
    """Return what a layer reads of each row, for this rank's rows; attention still reads all ``positions``."""
    if entering is not None:
        entering = cp.own(entering[0]), cp.own(entering[1])
    adapters = batch.adapters
    if adapters is not None:
        own = cp.own(torch.arange(batch.num_tokens)).numpy()
        adapters = replace(adapters, tokens=adapters.tokens.take(own))
    return replace(batch, input_ids=cp.own(batch.input_ids), adapters=adapters), entering


def all_rows(cp: ContextParallel, num_tokens: int, delta: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of all ranks, given this one's of both."""
    return cp.gather(delta, num_tokens), cp.gather(residual, num_tokens)
