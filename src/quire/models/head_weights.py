"""Weights of heads that draft, under their canonical names, and the ids that they know."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from quire.config import HeadsConfig
from quire.errors import ModelLoadError
from quire.models.head_checkpoint import open_heads
from quire.models.loader import iter_mapped, random_tensors
from quire.models.stored_weights import view
from quire.modelspec import ModelSpec


def iter_heads(heads: HeadsConfig, target: ModelSpec, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield (canonical name, tensor) of heads, in the order of `HeadSpec.shapes`. Raises as `iter_weights`."""
    shapes = heads.spec.shapes()
    if heads.load_format == "random":
        yield from random_tensors(shapes, heads.seed, dtype)
        return
    _, stored, sources = open_heads(Path(heads.path), target, mtp=heads.spec.method == "mtp")
    for name, weight in iter_mapped(heads.path, shapes, {}, stored, sources, dtype):
        assert isinstance(weight, Tensor)
        yield name, weight


def read_d2t(heads: HeadsConfig, target: ModelSpec) -> Tensor:
    """Return the ids that EAGLE-3 heads know, ``[draft_vocab_size]``: those of the model, in the order of its rows."""
    rows = torch.arange(heads.spec.draft_vocab_size)
    if heads.spec.draft_vocab_size == heads.spec.vocab_size or heads.load_format == "random":
        return rows
    _, stored, _ = open_heads(Path(heads.path), target)
    ids = rows + view(stored["d2t"]).to(torch.int64)
    wrong = torch.nonzero((ids < 0) | (ids >= target.vocab_size)).flatten()
    if wrong.numel() or len(set(ids.tolist())) < len(ids):
        row = int(wrong[0]) if wrong.numel() else -1
        raise ModelLoadError(
            f"{heads.path}: d2t must name every id once, in 0…{target.vocab_size - 1}"
            + (f"; row {row} gives {int(ids[row])}." if wrong.numel() else "; an id is there twice.")
        )
    return ids
