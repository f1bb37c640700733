"""The kernels of `kernels.sampling.triton`: the contract's noise and comparisons, in float64 without fused products."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.sampling.cut_triton_kernels import key_of

RANDOM = tl.constexpr(1)  # of `columns`
NOBODY = tl.constexpr(0x7FFFFFFF)


@triton.jit
def log_of(x):
    """`exact_math.log_f64` of normal positive float64."""
    bits = x.to(tl.int64, bitcast=True)
    k = ((bits >> 52) - 1022).to(tl.float64)
    m = ((bits & 0xFFFFFFFFFFFFF) | 0x3FE0000000000000).to(tl.float64, bitcast=True)
    small = m < 0.7071067811865476
    m = tl.where(small, m * 2.0, m)
    k = tl.where(small, k - 1.0, k)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    series = tl.full(z.shape, 1.0 / 23, tl.float64)
    for i in tl.static_range(11):
        series = series * z + 1.0 / (21 - 2 * i)
    return k * 0.6931471805599453 + 2.0 * s * series


@triton.jit
def noise_of(ids, seed, sample_index, position, purpose):
    """Gumbel noise of token ids in one stream, float64."""
    zero = (ids * 0).to(tl.uint32)
    c0, c1, c2, c3 = tl.philox(
        seed,
        zero + position.to(tl.uint32),
        (ids >> 2).to(tl.uint32),
        zero + purpose,
        zero + sample_index.to(tl.uint32),
    )
    which = ids & 3
    word = tl.where(which == 0, c0, tl.where(which == 1, c1, tl.where(which == 2, c2, c3)))
    u = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return -log_of(-log_of(u))


@triton.jit
def largest_of_chunks(logits, stride, tops, ids, vocab, CHUNK: tl.constexpr):
    """Program (row, chunk): the largest logit and its lowest id; NaN where there is one."""
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * stride + token, mask=token < vocab, other=float("-inf"))
    broken = tl.max((x != x).to(tl.int32), 0)
    top = tl.max(tl.where(x != x, float("-inf"), x), 0)
    best = tl.min(tl.where((x == top) & (token < vocab), token, NOBODY), 0)
    tl.store(tops + row * chunks + chunk, tl.where(broken > 0, float("nan"), top))
    tl.store(ids + row * chunks + chunk, best)


@triton.jit
def draw_chunks(
    logits, stride, tops, facts, cuts, values, ids, vocab, purpose,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): the largest of score + noise, for rows that draw. ``ids`` holds the argmax for the others.

    ``facts [rows, 8]`` int64: features, seed, sample index, position, the bits of temperature and log min_p, top_k, and
    the bits of top_p. ``cuts [rows, 2]``: of `cut_rows`; zeros cut nothing.
    """
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if tl.load(facts + row * 8) & RANDOM == 0:
        return
    other = tl.arange(0, CHUNKS)
    top = tl.max(tl.load(tops + row * chunks + other, mask=other < chunks, other=float("-inf")), 0)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * stride + token, mask=token < vocab, other=float("-inf"))
    temperature = tl.load(facts + row * 8 + 4).to(tl.float64, bitcast=True).to(tl.float32)
    scores = tl.div_rn(x - top, temperature + tl.zeros((CHUNK,), tl.float32))
    keys, cut = key_of(scores), tl.load(cuts + row * 2)
    kept = (keys > cut) | ((keys == cut) & (token <= tl.load(cuts + row * 2 + 1)))
    scores = scores.to(tl.float64)
    noise = noise_of(
        token,
        tl.load(facts + row * 8 + 1),
        tl.load(facts + row * 8 + 2),
        tl.load(facts + row * 8 + 3),
        purpose,
    )
    floor = tl.load(facts + row * 8 + 5).to(tl.float64, bitcast=True)
    possible = (token < vocab) & (scores >= floor) & kept
    drawn = tl.where(possible, scores + noise, float("-inf"))
    best = tl.max(drawn, 0)
    tl.store(values + row * chunks + chunk, best)
    tl.store(ids + row * chunks + chunk, tl.min(tl.where(drawn == best, token, NOBODY), 0))


@triton.jit
def fold_chunks(tops, facts, values, ids, out, best, CHUNKS: tl.constexpr, chunks):
    """Program (row): the chunk that won, ties to the lowest id; the largest logit, NaN where there is one."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    there = chunk < chunks
    top = tl.load(tops + row * chunks + chunk, mask=there, other=float("-inf"))
    broken = tl.max((top != top).to(tl.int32), 0)
    largest = tl.max(tl.where(top != top, float("-inf"), top), 0)
    if tl.load(facts + row * 8) & RANDOM:
        value = tl.load(values + row * chunks + chunk, mask=there, other=float("-inf"))
    else:
        value = top.to(tl.float64)
    token = tl.load(ids + row * chunks + chunk, mask=there, other=NOBODY)
    won = tl.min(tl.where((value == tl.max(value, 0)) & there, token, NOBODY), 0)
    tl.store(out + row, tl.where(won == NOBODY, 0, won).to(out.dtype.element_ty))
    tl.store(best + row, tl.where(broken > 0, float("nan"), largest))
