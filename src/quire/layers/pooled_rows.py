"""From the rows of an encoder's last layer to what a request wants of its text: one vector. fp32, a text at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def pooled(rows: Tensor, kind: str) -> Tensor:
    """``rows [num_tokens, size]`` of one text → ``[size]`` fp32, as sentence-transformers defines ``kind``.

    cls, last: of that row; mean, max: over all rows; mean_sqrt_len: their sum over √num_tokens; weighted_mean: row i,
    counted from 1, weighs i.
    """
    wide = rows.float()
    if kind in ("cls", "last"):
        return wide[0 if kind == "cls" else -1]
    if kind == "max":
        return wide.amax(0)
    if kind == "weighted_mean":
        weights = torch.arange(1, len(wide) + 1, dtype=torch.float32)
        return (wide * weights[:, None]).sum(0) / weights.sum()
    assert kind in ("mean", "mean_sqrt_len"), kind
    return wide.sum(0) / (len(wide) if kind == "mean" else len(wide) ** 0.5)
