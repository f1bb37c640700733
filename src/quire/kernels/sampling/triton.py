"""Sampling on a GPU: one pass for the largest logit, one for score + noise, without leaving the device.

Bytes: the logits twice. The noise is the contract's (`kernels.sampling`), computed for every id in float64, so that
tokens equal the reference's. Rows with top_k or top_p go through the reference on the device: `torch.topk`, no full
sort, and a synchronisation with the host. There a nucleus is added up in the device's order, so that its edge may
fall on another id where two masses agree to the last of float64's digits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.registry import register
from quire.kernels.sampling import draw
from quire.kernels.sampling.columns import MIN_P, TRUNCATED
from quire.kernels.sampling.triton_kernels import draw_chunks, fold_chunks, largest_of_chunks

CHUNK = 1024  # ids of a program


def can_stay(columns: NDArray[np.void]) -> bool:
    """Whether rows of these ``columns`` are drawn without the host."""
    return not (columns["features"] & TRUNCATED).any()


def facts_of(columns: NDArray[np.void]) -> NDArray[np.int64]:
    """What `draw_rows` reads of ``columns [rows]``: int64 ``[rows, 6]``, to be uploaded."""
    assert can_stay(columns)
    facts = np.empty((columns.size, 6), np.int64)
    for place, name in enumerate(("features", "seed", "sample_index", "position")):
        facts[:, place] = columns[name]
    facts[:, 4] = columns["temperature"].astype(np.float64).view(np.int64)
    floors = np.full(columns.size, -np.inf)
    with_floor = (columns["features"] & MIN_P) != 0
    floors[with_floor] = [math.log(p) for p in columns["min_p"][with_floor]]  # numpy's may round otherwise
    facts[:, 5] = floors.view(np.int64)
    return facts


def draw_rows(logits: Tensor, facts: Tensor, purpose: int) -> tuple[Tensor, Tensor]:
    """(ids int64, largest logits fp32), both ``[rows]`` on the device, where nothing waits for the host.

    ``logits [rows, vocab]`` fp32; ``facts`` as `facts_of` makes them. A row whose largest logit is not finite has no
    valid id.
    """
    rows, vocab = logits.shape
    assert logits.stride(1) == 1
    assert facts.shape == (rows, 6)
    device, chunks = logits.device, triton.cdiv(vocab, CHUNK)
    tops = torch.empty(rows, chunks, dtype=torch.float32, device=device)
    values = torch.empty(rows, chunks, dtype=torch.float64, device=device)
    ids = torch.empty(rows, chunks, dtype=torch.int32, device=device)
    out = torch.empty(rows, dtype=torch.int64, device=device)
    best = torch.empty(rows, dtype=torch.float32, device=device)
    if rows == 0:
        return out, best
    padded = triton.next_power_of_2(chunks)
    largest_of_chunks[(rows, chunks)](logits, logits.stride(0), tops, ids, vocab, CHUNK=CHUNK, num_warps=4)
    draw_chunks[(rows, chunks)](
        logits, logits.stride(0), tops, facts, values, ids, vocab, purpose, CHUNK=CHUNK, CHUNKS=padded, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    fold_chunks[(rows,)](tops, facts, values, ids, out, best, CHUNKS=padded, chunks=chunks, num_warps=4)
    return out, best


@register("sample", "triton")
def sample(
    logits: Tensor, edited: Mapping[int, Tensor], columns: NDArray[np.void], purpose: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """See `quire.kernels.sampling.sample`; the result is on the host."""
    if not can_stay(columns):
        return draw.sample(logits, edited, columns, purpose)
    if edited:
        logits = logits.clone()
        for row, values in edited.items():
            logits[row] = values
    facts = torch.from_numpy(facts_of(columns)).to(logits.device)
    ids, best = draw_rows(logits, facts, purpose)
    return ids.cpu().numpy(), best.cpu().numpy()
