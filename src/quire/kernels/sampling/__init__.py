"""The sampling ops: counter-based noise, Gumbel-max, exact exp/log/sum and exact top candidates.

    sample             logits [rows, vocab] + the parameters of each row -> token ids
    token_logprobs     logits [rows, vocab] + token ids -> logprobs, ranks and the most likely ids (`logprobs`)

`noise` and `truncate` next to this file have what the references are made of. `COLUMNS`, the record of numbers that
they read of each row, is laid out as csrc/cpu/sampling.h has it.

**Streams.** The noise of one token id is named by (seed, sample_index, position, token id, purpose). Philox4x32-10
(Salmon et al. 2011) maps it one-to-one to a 64-bit key, a 128-bit counter and one of four output words::

    key      = (seed & 0xffffffff, seed >> 32)                      seed as 64 bits, two's complement
    counter  = (position, token id >> 2, purpose, sample_index)     four neighbouring ids share one block
    word     = token id & 3

**Noise.** ``u = (word + 0.5) * 2**-32`` lies in (0, 1), both ends excluded, symmetric; ``g = -log(-log(u))`` with
`log_f64`, which is made of correctly rounded float64 operations only. The sampled token is the argmax over ids of
``float64(score) + g``, ties to the lowest id. Any implementation that follows these lines gives the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.registry import op
from quire.kernels.sampling.noise import Streams, gumbel_argmax, gumbel_argmax_of
from quire.kernels.sampling.truncate import Truncation, apply_min_p, truncate

# Bits of the `features` column.
RANDOM = 1  # temperature > 0
TRUNCATED = 2  # top_k or top_p
MIN_P = 4
EDITED = 8  # bias, penalties or constraints
LOGPROBS = 16

COLUMNS = np.dtype(
    [
        ("features", np.int64),
        ("temperature", np.float32),
        ("top_k", np.int64),  # vocab_size: off
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("seed", np.int64),
        ("sample_index", np.int64),
        ("position", np.int64),  # absolute position of the sampled token
        ("num_logprobs", np.int64),
    ],
    align=True,
)
SCRATCH_ELEMENTS = 1 << 22  # rows are copied in slices of this many numbers


@op("sample")
def sample(
    logits: Tensor, edited: Mapping[int, Tensor], columns: NDArray[np.void], purpose: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Sample one token per row: temperature, min_p, top_k, top_p, Gumbel-max; rows without noise take the largest.

    ``logits: [rows, vocab] float32``, on the CPU, stays as it is; ``edited[row]: [vocab]`` stands in for a row of it.
    ``columns``: `COLUMNS [rows]`. Returns (ids, largest logits), both ``[rows]``; a row whose largest logit is not
    finite (a NaN counts as the largest) has no valid id.
    """
    rows = columns.size
    assert logits.shape[0] == rows
    ids, best = np.empty(rows, np.int64), np.empty(rows, np.float32)
    random = (columns["features"] & RANDOM).astype(np.bool_)
    step = max(1, SCRATCH_ELEMENTS // logits.shape[1])
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        scores = logits[part]
        if changed := [row for row in edited if part.start <= row < part.stop]:
            scores = scores.clone()
            for row in changed:
                scores[row - start] = edited[row]
        tokens, largest = _argmax(scores)
        best[part] = largest.numpy()
        chosen = np.flatnonzero(random[part] & np.isfinite(best[part]))
        if chosen.size:
            index = torch.from_numpy(chosen)
            tokens[index] = _sample_random(scores[index], columns[part][chosen], purpose)
        ids[part] = tokens.numpy()
    return ids, best


def _argmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """(lowest id of the largest score, that score) of each row; a NaN is larger than everything."""
    ids = scores.argmax(dim=1)
    return ids, scores.gather(1, ids[:, None]).squeeze(1)


def _sample_random(scores: Tensor, columns: NDArray[np.void], purpose: int) -> Tensor:
    """Temperature, truncation and Gumbel-max over ``scores: [rows, vocab]``, which is overwritten."""
    features = columns["features"]
    scores.sub_(scores.amax(dim=1, keepdim=True))  # so that no temperature, however small, overflows
    scores.div_(_column(columns, "temperature")[:, None])
    seeds, indices, positions = (_column(columns, name) for name in ("seed", "sample_index", "position"))
    streams = Streams(seeds, indices, positions, purpose)
    limits = Truncation(*(_column(columns, name) for name in ("top_k", "top_p", "min_p")))
    rows = torch.from_numpy(np.flatnonzero(features & MIN_P))
    if rows.numel():
        scores[rows] = apply_min_p(scores[rows], limits.min_p[rows])
    truncated = (features & TRUNCATED).astype(np.bool_)
    if not truncated.any():
        return gumbel_argmax(scores, streams)
    tokens = torch.empty(columns.size, dtype=torch.int64)
    rows = torch.from_numpy(np.flatnonzero(truncated))
    tokens[rows] = gumbel_argmax_of(*truncate(scores[rows], limits.take(rows)), streams.take(rows))
    rows = torch.from_numpy(np.flatnonzero(~truncated))
    if rows.numel():
        tokens[rows] = gumbel_argmax(scores[rows], streams.take(rows))
    return tokens


def _column(columns: NDArray[np.void], name: str) -> Tensor:
    return torch.from_numpy(columns[name].copy())
