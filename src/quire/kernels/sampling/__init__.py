"""The sampling ops: counter-based noise, Gumbel-max, exact exp/log/sum and exact top candidates.

    sample             logits [rows, vocab] + the parameters of each row -> token ids
    token_logprobs     logits [rows, vocab] + token ids -> logprobs, ranks and the most likely ids

`noise`, `truncate` and `exact_math` beside this file have what the references are made of. `COLUMNS`, the record of
numbers that they read of each row, is laid out as csrc/cpu/sampling.h has it.

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

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.registry import native, op
from quire.kernels.sampling.noise import Streams, exp_f32, gumbel_argmax, gumbel_argmax_of, log_f64, tree_sum
from quire.kernels.sampling.truncate import Truncation, apply_min_p, top_candidates, truncate
from quire.kernels.threads import num_native_threads
from quire.request import TokenLogprobs

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
_SCRATCH_ELEMENTS = 1 << 22  # rows are copied in slices of this many numbers


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
    step = max(1, _SCRATCH_ELEMENTS // logits.shape[1])
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


def log_normalizer(logits: Tensor) -> Tensor:
    """log Σ exp of each row of ``logits: [rows, vocab] float32``, float64 ``[rows]``; bits depend on the row alone."""
    best = logits.amax(dim=1, keepdim=True)
    return best.squeeze(1).to(torch.float64) + log_f64(tree_sum(exp_f32(logits - best)))


@op("token_logprobs")
def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Logprob and rank of ``token_ids: [rows]`` and the ``num_top[row]`` most likely ids of each row.

    ``logits: [rows, vocab]`` are raw: before bias, penalties, masks, temperature and truncation. Equal logits rank by
    id, so ranks are distinct and the lists deterministic.
    """
    tensors = logprob_tensors(logits, token_ids, min(max(num_top), logits.shape[1]))
    return assemble(token_ids.tolist(), num_top, *(part.tolist() for part in tensors))


def logprob_tensors(logits: Tensor, token_ids: Tensor, widest: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logprob float64, rank) of ``token_ids``, both ``[rows]``, and (ids, logprobs) of the best, ``[rows, widest]``.

    All are on the device of ``logits``; the host does not wait for a GPU.
    """
    normalizer = log_normalizer(logits)
    chosen = logits.gather(1, token_ids[:, None])
    ids = torch.arange(logits.shape[1], device=logits.device)
    ahead = (logits > chosen) | ((logits == chosen) & (ids < token_ids[:, None]))
    logprobs = chosen.squeeze(1).to(torch.float64) - normalizer
    ranks = ahead.sum(dim=1) + 1
    if widest == 0:
        return logprobs, ranks, token_ids.new_empty(len(ranks), 0), logprobs.new_empty(len(ranks), 0)
    values, best_ids = top_candidates(logits, widest, masked_too=True)
    return logprobs, ranks, best_ids, values.to(torch.float64) - normalizer[:, None]


def assemble(
    token_ids: Sequence[int], num_top: Sequence[int], logprobs: list[float], ranks: list[int],
    top_ids: list[list[int]], top_logprobs: list[list[float]],
) -> list[TokenLogprobs]:  # fmt: skip
    """Return one entry per row of what `logprob_tensors` found, on the host."""
    return [
        TokenLogprobs(
            token_id, logprobs[row], ranks[row], tuple(top_ids[row][:k]), tuple(top_logprobs[row][:k])
        )
        for row, (token_id, k) in enumerate(zip(token_ids, num_top, strict=True))
    ]


@sample.native()
def native_sample(
    isa: str, logits: Tensor, edited: Mapping[int, Tensor], columns: NDArray[np.void], purpose: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    assert logits.shape[0] == columns.size
    assert columns.flags.c_contiguous
    assert columns.dtype == COLUMNS
    rows, vocab = logits.shape
    stride, last = logits.stride()
    assert last == 1
    instead = []
    for row, changed in edited.items():
        assert changed.is_contiguous()
        instead.append((row, changed.data_ptr()))
    out = np.empty(2 * rows, np.int64)  # one array, since to ask for an address takes 1 µs
    at = out.ctypes.data
    native.sample(
        num_native_threads(), isa, logits.data_ptr(), stride, instead, columns.ctypes.data, rows, vocab, purpose,
        at, at + 8 * rows,
    )  # fmt: skip
    return out[:rows], out[rows:].view(np.float32)[:rows]


@token_logprobs.native()
def native_token_logprobs(
    isa: str, logits: Tensor, token_ids: Tensor, num_top: Sequence[int]
) -> list[TokenLogprobs]:
    rows, vocab = logits.shape
    wanted = np.minimum(np.array(num_top, np.int64), vocab)
    width = int(wanted.max(initial=0))
    addresses = _addresses(logits)
    chosen = token_ids.contiguous().numpy()
    logprobs, ranks = np.empty(rows), np.empty(rows, np.int64)
    top_ids, top_logprobs = np.empty((rows, width), np.int64), np.empty((rows, width))
    native.logprobs(
        num_native_threads(), isa, addresses.ctypes.data, chosen.ctypes.data, wanted.ctypes.data, rows, vocab,
        width, logprobs.ctypes.data, ranks.ctypes.data, top_ids.ctypes.data, top_logprobs.ctypes.data,
    )  # fmt: skip
    columns = (logprobs.tolist(), ranks.tolist(), top_ids.tolist(), top_logprobs.tolist())
    return assemble(chosen.tolist(), wanted.tolist(), *columns)


def _addresses(logits: Tensor) -> NDArray[np.int64]:
    """Where each row of ``logits: [rows, vocab]`` lies."""
    assert logits.device.type == "cpu"
    assert logits.stride(1) == 1
    return logits.data_ptr() + np.arange(logits.shape[0]) * (logits.stride(0) * 4)
