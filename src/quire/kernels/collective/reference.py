"""The contracts of the collectives as functions of all members' rows, ``[num_tokens, size]`` each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def all_reduce(rows: Sequence[Tensor], out_dtype: torch.dtype) -> Tensor:
    """Sum in fp32 in the order of the members; rounded once."""
    total = rows[0].float()
    for row in rows[1:]:
        total = total + row.float()
    return total.to(out_dtype)


def all_gather(rows: Sequence[Tensor]) -> Tensor:
    """Side by side; members may have different numbers of columns."""
    return torch.cat(list(rows), dim=1)


def reduce_scatter(rows: Sequence[Tensor], index: int, out_dtype: torch.dtype) -> Tensor:
    """Block ``index`` of the sum."""
    return all_reduce([block(row, index, len(rows)) for row in rows], out_dtype)


def all_to_all(rows: Sequence[Tensor], index: int) -> Tensor:
    """Block ``index`` of every member's rows."""
    return torch.cat([block(row, index, len(rows)) for row in rows], dim=1)


def gather_parts(rows: Sequence[Tensor]) -> Tensor:
    """One after another; members may have different numbers of rows."""
    return torch.cat(list(rows))


def block(x: Tensor, index: int, count: int) -> Tensor:
    """Return the ``index``-th of ``count`` equal parts of each row."""
    size = x.shape[1] // count
    assert size * count == x.shape[1], (x.shape, count)
    return x[:, index * size : (index + 1) * size]
