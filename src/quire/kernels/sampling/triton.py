"""Sampling on a GPU: one pass for the largest logit, one for score + noise, without leaving the device.

Bytes: the logits twice, and twice more where rows have top_k or top_p (`cut_triton_kernels`). The noise is the
contract's (`kernels.sampling`), computed for every id in float64, so that tokens equal the reference's.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.sampling.columns import LOGPROBS, MIN_P, TRUNCATED
from quire.kernels.sampling.cut_triton_kernels import cut_rows
from quire.kernels.sampling.triton_kernels import draw_chunks, fold_chunks, largest_of_chunks

CHUNK = 1024  # ids of a program
CANDIDATES = 1024  # of a row, where top_k and top_p look first


def facts_of(columns: NDArray[np.void]) -> NDArray[np.int64]:
    """What `draw_rows` reads of ``columns [rows]``: int64 ``[rows, 8]``, to be uploaded."""
    facts = np.empty((columns.size, 8), np.int64)
    for place, name in enumerate(("features", "seed", "sample_index", "position")):
        facts[:, place] = columns[name]
    facts[:, 4] = columns["temperature"].astype(np.float64).view(np.int64)
    floors = np.full(columns.size, -np.inf)
    with_floor = (columns["features"] & MIN_P) != 0
    floors[with_floor] = [math.log(p) for p in columns["min_p"][with_floor]]  # numpy's may round otherwise
    facts[:, 5] = floors.view(np.int64)
    facts[:, 6] = columns["top_k"]
    facts[:, 7] = columns["top_p"].view(np.int64)
    return facts


def truncated(columns: NDArray[np.void]) -> bool:
    """Whether any row has top_k or top_p."""
    return bool((columns["features"] & TRUNCATED).any())


def logprobs_wanted(columns: NDArray[np.void]) -> tuple[NDArray[np.int64], list[int]]:
    """Which rows of ``columns`` want log-probabilities, and how many alternatives each."""
    rows = np.flatnonzero(columns["features"] & LOGPROBS)
    return rows, columns["num_logprobs"][rows].tolist()


def draw_rows(logits: Tensor, facts: Tensor, purpose: int, *, cut: bool) -> tuple[Tensor, Tensor]:
    """(ids int64, largest logits fp32), both ``[rows]`` on the device, where nothing waits for the host.

    ``logits [rows, vocab]`` fp32; ``facts`` as `facts_of` makes them; ``cut``: any row is `truncated`. A row whose
    largest logit is not finite has no valid id.
    """
    rows, vocab = logits.shape
    assert logits.stride(1) == 1
    assert facts.shape == (rows, 8)
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
    cuts = torch.zeros(rows, 2, dtype=torch.int64, device=device)
    if cut:
        best_logits = torch.topk(logits, min(vocab, CANDIDATES), dim=1, sorted=False).values
        for wide in (False, True) if vocab > CANDIDATES else (False,):
            of = logits if wide else best_logits
            cut_rows[(rows,)](
                of, of.stride(0), of.shape[1], logits, logits.stride(0), vocab, tops, chunks, facts, cuts, WIDE=wide,
                CHUNK=CHUNK, CHUNKS=padded, num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
    draw_chunks[(rows, chunks)](
        logits, logits.stride(0), tops, facts, cuts, values, ids, vocab, purpose, CHUNK=CHUNK, CHUNKS=padded,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    fold_chunks[(rows,)](tops, facts, values, ids, out, best, CHUNKS=padded, chunks=chunks, num_warps=4)
    return out, best
