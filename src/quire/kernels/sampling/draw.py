"""The op `sample` in torch: one token a row, by temperature, truncation and Gumbel-max, or by argmax."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.registry import register
from quire.kernels.sampling.columns import MIN_P, RANDOM, TRUNCATED
from quire.kernels.sampling.reference import Streams
from quire.kernels.sampling.select import gumbel_argmax, gumbel_argmax_of
from quire.kernels.sampling.truncate import Truncation, apply_min_p, truncate

_SCRATCH_ELEMENTS = 1 << 22  # rows are copied in slices of this many numbers


@register("sample", "reference")
def sample(
    logits: Tensor, edited: Mapping[int, Tensor], columns: NDArray[np.void], purpose: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """See `quire.kernels.sampling.sample`."""
    rows = columns.size
    ids, best = np.empty(rows, np.int64), np.empty(rows, np.float32)
    random = (columns["features"] & RANDOM).astype(np.bool_)
    step = max(1, _SCRATCH_ELEMENTS // logits.shape[1])
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        scores = logits[part]
        if changed := [row for row in edited if part.start <= row < part.stop]:
            scores = scores.clone()
            for row in changed:
                scores[row - start] = edited[row]
        tokens, largest = _argmax(scores)
        best[part] = largest.cpu().numpy()
        drawn = np.flatnonzero(random[part] & np.isfinite(best[part]))
        if drawn.size:
            index = torch.from_numpy(drawn).to(logits.device)
            tokens[index] = _draw_random(scores[index], columns[part][drawn], purpose)
        ids[part] = tokens.cpu().numpy()
    return ids, best


def _argmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """(lowest id of the largest score, that score) of each row; a NaN is larger than everything."""
    ids = scores.argmax(dim=1)
    return ids, scores.gather(1, ids[:, None]).squeeze(1)


def _draw_random(scores: Tensor, columns: NDArray[np.void], purpose: int) -> Tensor:
    """Temperature, truncation and Gumbel-max over ``scores: [rows, vocab]``, which is overwritten."""
    features = columns["features"]
    scores.sub_(scores.amax(dim=1, keepdim=True))  # so that no temperature, however small, overflows
    scores.div_(_column(columns, "temperature", scores)[:, None])
    streams = Streams(
        _column(columns, "seed", scores),
        _column(columns, "sample_index", scores),
        _column(columns, "position", scores),
        purpose,
    )
    limits = Truncation(*(_column(columns, name, scores) for name in ("top_k", "top_p", "min_p")))
    rows = torch.from_numpy(np.flatnonzero(features & MIN_P)).to(scores.device)
    if rows.numel():
        scores[rows] = apply_min_p(scores[rows], limits.min_p[rows])
    truncated = (features & TRUNCATED).astype(np.bool_)
    if not truncated.any():
        return gumbel_argmax(scores, streams)
    tokens = torch.empty(columns.size, dtype=torch.int64, device=scores.device)
    rows = torch.from_numpy(np.flatnonzero(truncated)).to(scores.device)
    tokens[rows] = gumbel_argmax_of(*truncate(scores[rows], limits.take(rows)), streams.take(rows))
    rows = torch.from_numpy(np.flatnonzero(~truncated)).to(scores.device)
    if rows.numel():
        tokens[rows] = gumbel_argmax(scores[rows], streams.take(rows))
    return tokens


def _column(columns: NDArray[np.void], name: str, like: Tensor) -> Tensor:
    return torch.from_numpy(columns[name].copy()).to(like.device)
