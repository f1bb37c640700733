"""Noise from a counter, and the argmax of score + noise (Gumbel-max), in the bits that `kernels.sampling` defines.

Philox: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. The words are made in numpy,
in half the time of torch's int64 arithmetic. `gumbel_argmax` bounds every perturbed score from above with
one float32 logarithm, and computes the exact noise only of the few ids whose bound reaches the best. It reads 4
bytes of logits per id and makes a quarter of a Philox block; the integer arithmetic takes most of the time.

exp, log and sum have bits that depend on the row alone. Library exp and log may use another algorithm in the tail of a
vector, and library sums choose their order from the shape and the threads. These are built from +, -, * and / of IEEE
754, which are correctly rounded everywhere, in a fixed order. No operation here may be contracted to a fused
multiply-add in another implementation.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_LN2 = 0.6931471805599453
_SQRT_HALF = 0.7071067811865476
_LOG2_E = 1.44269504088896341
_LN2_HIGH = 0.693359375  # nine bits, so that k * _LN2_HIGH is exact in float32
_LN2_LOW = -2.12194440054690583e-4
_EXP_SERIES = tuple(1.0 / factorial for factorial in (5040.0, 720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0))
_LOG_SERIES = tuple(1.0 / odd for odd in range(23, 0, -2))


def log_f64(x: Tensor) -> Tensor:
    """Natural logarithm of positive, finite float64 values, to about 1e-15 relative, near 1 too.

    ``x = m * 2**k`` with m in [sqrt(1/2), sqrt(2)), ``s = (m - 1) / (m + 1)`` and
    ``log x = k * log 2 + 2 s (1 + s^2/3 + s^4/5 + … + s^22/23)``; the next term is below 1e-18.
    """
    assert x.dtype == torch.float64
    mantissa, exponent = torch.frexp(x)
    small = mantissa < _SQRT_HALF
    mantissa = torch.where(small, mantissa * 2.0, mantissa)
    k = torch.where(small, exponent - 1, exponent).to(torch.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    z = s * s
    series = torch.full_like(z, _LOG_SERIES[0])
    for coefficient in _LOG_SERIES[1:]:
        series.mul_(z).add_(coefficient)
    return k * _LN2 + 2.0 * s * series


def exp_f32(x: Tensor) -> Tensor:
    """exp of float32 values ≤ 0, to about 1e-7 relative; below -87 (and for -inf) it is 0.

    ``x = k log 2 + r`` with |r| ≤ log(2)/2, then the Taylor series of r to the seventh power, then 2**k by its bits.
    """
    assert x.dtype == torch.float32
    zero = x < -87.0
    x = torch.where(zero, torch.zeros_like(x), x)
    k = torch.round(x * _LOG2_E)
    r = (x - k * _LN2_HIGH).sub_(k * _LN2_LOW)
    series = torch.full_like(r, _EXP_SERIES[0])
    for coefficient in _EXP_SERIES[1:]:
        series.mul_(r).add_(coefficient)
    power = ((k.to(torch.int32) + 127) << 23).view(torch.float32)
    return series.mul_(power).masked_fill_(zero, 0.0)


def tree_sum(x: Tensor) -> Tensor:
    """Sum of the last dimension in float64: ``x: [..., n]`` -> ``[...]``.

    Halves are added elementwise until one column is left, so the order depends on n alone.
    """
    total = x.to(torch.float64)
    while (n := total.shape[-1]) > 1:
        half = n // 2
        folded = total[..., :half] + total[..., half : 2 * half]
        total = folded if n % 2 == 0 else torch.cat((folded, total[..., -1:]), dim=-1)
    return total[..., 0]


WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

_MASK, _SHIFT = np.uint64(WORD), np.uint64(32)
_MULTIPLIER0, _MULTIPLIER1 = (np.uint64(m) for m in MULTIPLIERS)
_WEYL0, _WEYL1 = (np.uint64(w) for w in WEYL)
_IDS_AT_ONCE = 1 << 16  # ids per pass, so that temporaries stay in the L2 cache
# The bound's float32 rounding errors add up to less than 1e-5 where they matter (scores within 30 of the best).
_MARGIN = 1e-3

Words = NDArray[np.uint64]


class Streams(NamedTuple):
    """The names of each row's noise, all int64 ``[rows]``, and the purpose of the sample."""

    seeds: Tensor
    sample_indices: Tensor
    positions: Tensor  # absolute position of the sampled token
    purpose: int = 0

    def take(self, rows: Tensor | slice) -> Streams:
        """The streams of ``rows``, int64 of any length."""
        return Streams(self.seeds[rows], self.sample_indices[rows], self.positions[rows], self.purpose)


def gumbel_of_words(words: Tensor) -> Tensor:
    """Words 0 … 2**32 − 1 -> standard Gumbel noise, float64, between −3.14 and 22.88."""
    uniform = (words.to(torch.float64) + 0.5) * 2.0**-32
    return -log_f64(-log_f64(uniform))


def random_words(streams: Streams, token_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The 32-bit word of each (stream, token id): ``token_ids: [rows, n]`` -> int64 ``[rows, n]``."""
    blocks = _philox(streams, token_ids.astype(np.uint64) >> np.uint64(2))
    return np.choose(token_ids & 3, blocks).astype(np.int64)


def uniform_complement(streams: Streams, vocab: int) -> NDArray[np.float32]:
    """About 1 − u of every id, never 0: float32 ``[rows, vocab]``. Whole blocks are made at once."""
    num_blocks = (vocab + 3) // 4
    blocks = _philox(streams, np.arange(num_blocks, dtype=np.uint64)[None, :])
    complement = np.empty((*blocks[0].shape, 4), np.float32)
    for word, values in enumerate(blocks):
        complement[:, :, word] = _MASK - values
    complement += np.float32(0.5)
    complement *= np.float32(2.0**-32)
    return complement.reshape(-1, num_blocks * 4)[:, :vocab]


def _philox(streams: Streams, block_ids: Words) -> tuple[Words, Words, Words, Words]:
    """Four words of each block: ``block_ids: [rows or 1, n]`` -> four times uint64 ``[rows, n]``."""
    seeds, sample_indices, positions = (
        column.numpy().astype(np.uint64)[:, None]
        for column in (streams.seeds, streams.sample_indices, streams.positions)
    )
    shape = np.broadcast_shapes(seeds.shape, block_ids.shape)
    c0, c1 = np.broadcast_to(positions, shape), np.broadcast_to(block_ids, shape)
    c2, c3 = np.full(shape, streams.purpose, np.uint64), np.broadcast_to(sample_indices, shape)
    k0, k1 = seeds & _MASK, seeds >> _SHIFT
    for _ in range(ROUNDS):
        product0, product1 = c0 * _MULTIPLIER0, c2 * _MULTIPLIER1
        c0 = np.right_shift(product1, _SHIFT, dtype=np.uint64)
        c0 ^= c1
        c0 ^= k0
        c2 = np.right_shift(product0, _SHIFT, dtype=np.uint64)
        c2 ^= c3
        c2 ^= k1
        c1 = np.bitwise_and(product1, _MASK, out=product1)
        c3 = np.bitwise_and(product0, _MASK, out=product0)
        k0, k1 = (k0 + _WEYL0) & _MASK, (k1 + _WEYL1) & _MASK
    return c0, c1, c2, c3


def gumbel_noise(streams: Streams, token_ids: Tensor) -> Tensor:
    """Gumbel noise of each (stream, token id): ``token_ids: int64 [rows, n]`` -> float64 ``[rows, n]``."""
    return gumbel_of_words(torch.from_numpy(random_words(streams, token_ids.numpy())))


def gumbel_argmax(scores: Tensor, streams: Streams) -> Tensor:
    """Sample one id per row: argmax of ``float64(scores) + gumbel_noise``, lowest id on ties.

    scores: ``[rows, vocab]`` float32; −inf never wins. Returns int64 ``[rows]``.
    """
    rows, vocab = scores.shape
    step = max(1, _IDS_AT_ONCE // vocab)
    row_parts, id_parts = [], []
    for start in range(0, rows, step):
        part = slice(start, start + step)
        row_part, id_part = _survivors(scores[part], streams.take(part))
        row_parts.append(row_part + start)
        id_parts.append(id_part)
    row_of, id_of = torch.cat(row_parts), torch.cat(id_parts)
    if row_of.numel() == rows:
        return id_of
    exact = scores[row_of, id_of].to(torch.float64)
    exact += gumbel_noise(streams.take(row_of), id_of[:, None]).squeeze(1)
    return _first_max_by_row(row_of, id_of, exact, rows)


def _survivors(scores: Tensor, streams: Streams) -> tuple[Tensor, Tensor]:
    """Return the rows and the ids that may win, at least one per row, int64 ``[n]`` each, sorted by (row, id)."""
    complement = torch.from_numpy(uniform_complement(streams, scores.shape[1]))  # v = 1 − u
    # E = −log(u) lies between v and v / (1 − v), so g = −log(E) lies between −log(v) + log(1 − v) and −log(v):
    # both are tight for the large g that win.
    centered = scores - scores.amax(dim=1, keepdim=True)
    bound = centered - torch.log(complement)
    likely = bound.argmax(dim=1, keepdim=True)
    reached = bound.gather(1, likely) + torch.log1p(-complement.gather(1, likely))
    rows, ids = (bound >= reached - _MARGIN).nonzero(as_tuple=True)
    return rows, ids


def _first_max_by_row(row_of: Tensor, id_of: Tensor, values: Tensor, rows: int) -> Tensor:
    """Return per row the id of the largest value. Entries are sorted by (row, id), so the first one wins ties."""
    best = torch.full((rows,), -torch.inf, dtype=torch.float64).scatter_reduce_(0, row_of, values, "amax")
    winners = values == best[row_of]
    winner = torch.full((rows,), torch.iinfo(torch.int64).max)
    return winner.scatter_reduce_(0, row_of[winners], id_of[winners], "amin")


def gumbel_argmax_of(scores: Tensor, token_ids: Tensor, streams: Streams) -> Tensor:
    """Sample among given ids: ``scores, token_ids: [rows, n]``, −inf for padding -> int64 ``[rows]``."""
    values = scores.to(torch.float64) + gumbel_noise(streams, token_ids)
    best = values.amax(dim=1, keepdim=True)
    beaten = torch.iinfo(torch.int64).max
    return token_ids.masked_fill(values < best, beaten).amin(dim=1)
