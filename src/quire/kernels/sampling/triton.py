"""Sampling on a GPU: one pass for the largest logit, one for score + noise, without leaving the device.

Bytes: the logits twice, and twice more where rows have top_k or top_p. The noise is the contract's
(`kernels.sampling`), computed for every id in float64 without fused products, so that tokens equal the reference's.

`cut_rows`, top_k and top_p, works without a sort and without the host. They keep all ids above a score, and of the ids
with just that score the lowest. The score is found bit by bit: the largest for which what is at least as large counts
top_k ids, or weighs top_p. A first launch looks at a row's best 1,024 logits, one tile; rows that need more are found
there, and only they read the whole vocabulary (32 times) in a second one. Masses are added in this order and not the
reference's, so that a nucleus may end at another id where two masses agree to the last of float64's digits.
"""

from __future__ import annotations

import math
from typing import no_type_check

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.sampling import LOGPROBS, MIN_P, RANDOM, TRUNCATED

CHUNK = 1024  # ids per program
CANDIDATES = 1024  # per row, where top_k and top_p look first
IS_RANDOM = tl.constexpr(RANDOM)
IS_TRUNCATED = tl.constexpr(TRUNCATED)
SHORT = tl.constexpr(-2)  # in the place of a cut: the candidates did not suffice
NO_ID = tl.constexpr(0x7FFFFFFF)


def facts_of(columns: NDArray[np.void]) -> NDArray[np.int64]:
    """What `sample_rows` reads of ``columns [rows]``: int64 ``[rows, 8]``, to be uploaded."""
    facts = np.empty((columns.size, 8), np.int64)
    for place, name in enumerate(("features", "seed", "sample_index", "position")):
        facts[:, place] = columns[name]
    facts[:, 4] = columns["temperature"].astype(np.float64).view(np.int64)
    floors = np.full(columns.size, -np.inf)
    with_floor = (columns["features"] & MIN_P) != 0
    floors[with_floor] = [
        math.log(p) for p in columns["min_p"][with_floor]
    ]  # numpy's log may round differently
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


def sample_rows(logits: Tensor, facts: Tensor, purpose: int, *, cut: bool) -> tuple[Tensor, Tensor]:
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
    sample_chunks[(rows, chunks)](
        logits, logits.stride(0), tops, facts, cuts, values, ids, vocab, purpose, CHUNK=CHUNK, CHUNKS=padded,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    fold_chunks[(rows,)](tops, facts, values, ids, out, best, CHUNKS=padded, chunks=chunks, num_warps=4)
    return out, best


@triton.jit
@no_type_check
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
@no_type_check
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
@no_type_check
def largest_of_chunks(logits, stride, tops, ids, vocab, CHUNK: tl.constexpr):
    """Program (row, chunk): the largest logit and its lowest id; NaN where there is one."""
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * stride + token, mask=token < vocab, other=float("-inf"))
    broken = tl.max((x != x).to(tl.int32), 0)
    top = tl.max(tl.where(x != x, float("-inf"), x), 0)
    best = tl.min(tl.where((x == top) & (token < vocab), token, NO_ID), 0)
    tl.store(tops + row * chunks + chunk, tl.where(broken > 0, float("nan"), top))
    tl.store(ids + row * chunks + chunk, best)


@triton.jit
@no_type_check
def sample_chunks(
    logits, stride, tops, facts, cuts, values, ids, vocab, purpose,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): the largest of score + noise, for rows with noise. ``ids`` holds the argmax for the others.

    ``facts [rows, 8]`` int64: features, seed, sample index, position, the bits of temperature and log min_p, top_k, and
    the bits of top_p. ``cuts [rows, 2]``: of `cut_rows`; zeros cut nothing.
    """
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if tl.load(facts + row * 8) & IS_RANDOM == 0:
        return
    other = tl.arange(0, CHUNKS)
    top = tl.max(tl.load(tops + row * chunks + other, mask=other < chunks, other=float("-inf")), 0)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * stride + token, mask=token < vocab, other=float("-inf"))
    temperature = tl.load(facts + row * 8 + 4).to(tl.float64, bitcast=True).to(tl.float32)
    scores = tl.div_rn(x - top, temperature + tl.zeros((CHUNK,), tl.float32))
    keys, cut = key_of(scores), tl.load(cuts + row * 2)
    is_kept = (keys > cut) | ((keys == cut) & (token <= tl.load(cuts + row * 2 + 1)))
    scores = scores.to(tl.float64)
    noise = noise_of(
        token,
        tl.load(facts + row * 8 + 1),
        tl.load(facts + row * 8 + 2),
        tl.load(facts + row * 8 + 3),
        purpose,
    )
    floor = tl.load(facts + row * 8 + 5).to(tl.float64, bitcast=True)
    possible = (token < vocab) & (scores >= floor) & is_kept
    noisy = tl.where(possible, scores + noise, float("-inf"))
    best = tl.max(noisy, 0)
    tl.store(values + row * chunks + chunk, best)
    tl.store(ids + row * chunks + chunk, tl.min(tl.where(noisy == best, token, NO_ID), 0))


@triton.jit
@no_type_check
def fold_chunks(tops, facts, values, ids, out, best, CHUNKS: tl.constexpr, chunks):
    """Program (row): the chunk that won, ties to the lowest id; the largest logit, NaN where there is one."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    there = chunk < chunks
    top = tl.load(tops + row * chunks + chunk, mask=there, other=float("-inf"))
    broken = tl.max((top != top).to(tl.int32), 0)
    largest = tl.max(tl.where(top != top, float("-inf"), top), 0)
    if tl.load(facts + row * 8) & IS_RANDOM:
        value = tl.load(values + row * chunks + chunk, mask=there, other=float("-inf"))
    else:
        value = top.to(tl.float64)
    token = tl.load(ids + row * chunks + chunk, mask=there, other=NO_ID)
    won = tl.min(tl.where((value == tl.max(value, 0)) & there, token, NO_ID), 0)
    tl.store(out + row, tl.where(won == NO_ID, 0, won).to(out.dtype.element_ty))
    tl.store(best + row, tl.where(broken > 0, float("nan"), largest))


@triton.jit
@no_type_check
def key_of(score):
    """fp32 as int64 ≥ 0 in the same order."""
    bits = score.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
@no_type_check
def exp_of(x):
    """`exact_math.exp_f32` of fp32 ≤ 0."""
    near = tl.where(x < -87.0, 0.0, x)
    k = (near * 1.44269504088896341 + 12582912.0) - 12582912.0  # to the nearest integer
    r = (near - k * 0.693359375) - k * -2.12194440054690583e-4
    series = r * (1.0 / 5040.0) + 1.0 / 720.0
    series = series * r + 1.0 / 120.0
    series = series * r + 1.0 / 24.0
    series = series * r + 1.0 / 6.0
    series = series * r + 0.5
    series = series * r + 1.0
    series = series * r + 1.0
    power = ((k.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < -87.0, 0.0, series * power)


@triton.jit
@no_type_check
def tile_of(values, start, num, top, temperature, floor, CHUNK: tl.constexpr):
    """(keys, scores, which may be sampled) of the values from ``start`` on."""
    place = start + tl.arange(0, CHUNK)
    x = tl.load(values + place, mask=place < num, other=float("-inf"))
    score = tl.div_rn(x - top, temperature + tl.zeros((CHUNK,), tl.float32))
    possible = (place < num) & (score.to(tl.float64) >= floor) & (score > float("-inf"))
    return key_of(score), score, possible


@triton.jit
@no_type_check
def above(values, num, key, top, temperature, floor, CHUNK: tl.constexpr):
    """(number, mass) of what has at least ``key``, both float64."""
    count = floor * 0.0
    mass = floor * 0.0
    for chunk in range(tl.cdiv(num, CHUNK)):
        keys, scores, possible = tile_of(values, chunk * CHUNK, num, top, temperature, floor, CHUNK)
        counted = possible & (keys >= key)
        count += tl.sum(counted.to(tl.int32), 0)
        mass += tl.sum(tl.where(counted, exp_of(scores).to(tl.float64), 0.0), 0)
    return count, mass


@triton.jit
@no_type_check
def largest_key(values, num, wanted, top, temperature, floor, BY_MASS: tl.constexpr, CHUNK: tl.constexpr):
    """The largest key at which there is as much as ``wanted``; 0 where there is never so much."""
    best = (wanted * 0.0).to(tl.int64)
    for bit in range(32):
        tried = best | ((best * 0 + 1) << (31 - bit))
        count, mass = above(values, num, tried, top, temperature, floor, CHUNK)
        enough = mass if BY_MASS else count
        best = tl.where(enough >= wanted, tried, best)
    return best


@triton.jit
@no_type_check
def weight_of(key):
    """The mass of one id whose score has ``key``."""
    bits = (key - 2147483648).to(tl.int32)
    return exp_of((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)).to(tl.float64)


@triton.jit
@no_type_check
def cut_rows(
    values, values_stride, num, logits, stride, vocab, tops, chunks, facts, cuts,
    WIDE: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Program (row): the least key that is kept, and the last id that is kept of those that have it.

    ``values``: candidates, or with WIDE the logits again. ``facts [rows, 8]`` and ``tops`` as `sample_chunks` has them.
    """
    row = tl.program_id(0).to(tl.int64)
    facts += row * 8
    if tl.load(facts) & IS_TRUNCATED == 0:
        return
    if WIDE:  # noqa: SIM102  a constant, and then a value
        if tl.load(cuts + row * 2) != SHORT:
            return
    values += row * values_stride
    logits += row * stride
    other = tl.arange(0, CHUNKS)
    top = tl.max(tl.load(tops + row * chunks + other, mask=other < chunks, other=float("-inf")), 0)
    temperature = tl.load(facts + 4).to(tl.float64, bitcast=True).to(tl.float32)
    floor = tl.maximum(tl.load(facts + 5).to(tl.float64, bitcast=True), -1e30)
    top_k, top_p = tl.load(facts + 6), tl.load(facts + 7).to(tl.float64, bitcast=True)
    cut, num_kept = row * 0, row * 0 + NO_ID
    short = (top_k < vocab) & (top_k > num)
    if top_k < vocab:
        cut = largest_key(values, num, top_k.to(tl.float64), top, temperature, floor, False, CHUNK)
        count, total = above(values, num, cut + 1, top, temperature, floor, CHUNK)
        num_kept = top_k - count.to(tl.int64)
        total += tl.where(cut > 0, num_kept.to(tl.float64) * weight_of(cut), 0.0)
    else:
        count, total = above(logits, vocab, row * 0, top, temperature, floor, CHUNK)
    if top_p < 1.0:
        wanted = top_p * total
        count, there = above(values, num, row * 0, top, temperature, floor, CHUNK)
        short = short | ((num < vocab) & (top_k >= vocab) & (there < wanted))
        nucleus = largest_key(values, num, wanted, top, temperature, floor, True, CHUNK)
        count, mass = above(values, num, nucleus + 1, top, temperature, floor, CHUNK)
        lacking = (wanted - mass) / weight_of(nucleus)
        places = lacking.to(tl.int64)
        places = tl.maximum(places + (places.to(tl.float64) < lacking).to(tl.int64), 1)
        num_kept = tl.where(
            nucleus > cut, places, tl.where(nucleus == cut, tl.minimum(num_kept, places), num_kept)
        )
        cut = tl.maximum(nucleus, cut)
    last = row * 0 + vocab
    seen = row * 0
    for chunk in range(tl.cdiv(vocab, CHUNK)):
        keys, _, possible = tile_of(logits, chunk * CHUNK, vocab, top, temperature, floor, CHUNK)
        equal = (possible & (keys == cut)).to(tl.int32)
        counted = tl.cumsum(equal, 0).to(tl.int64) + seen
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        last = tl.minimum(last, tl.min(tl.where((equal > 0) & (counted == num_kept), token, NO_ID), 0))
        seen += tl.sum(equal, 0)
    tl.store(cuts + row * 2, tl.where(short, row * 0 + SHORT, cut))
    tl.store(cuts + row * 2 + 1, last)


@triton.jit
@no_type_check
def edit_rows(logits, stride, out, facts, counts, masks, bias_ids, biases, vocab, words, CHUNK: tl.constexpr):
    """Program (row, chunk) writes ``out [rows, vocab]``. No product may be fused with a sum.

    ``facts [rows, 8]`` int64: row of ``counts`` or −1, row of ``masks`` or −1, the bits of repetition, frequency and
    presence as float64, first bias and end of the biases. ``counts``: 2 · times sampled, + 1 if the prompt has the id.
    ``masks [rows masked, words]``: one bit per id, set where it is allowed. ``biases``: the bits of float64.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    there = token < vocab
    x = tl.load(logits + row * stride + token, mask=there, other=0.0)
    of = facts + row * 8
    for i in range(tl.load(of + 5), tl.load(of + 6)):
        bias = tl.load(biases + i).to(tl.float64, bitcast=True).to(tl.float32)
        x = tl.where(token == tl.load(bias_ids + i), x + bias, x)
    counted = tl.load(of)
    if counted >= 0:
        count = tl.load(counts + counted * vocab + token, mask=there, other=0)
        repetition = tl.load(of + 2).to(tl.float64, bitcast=True).to(tl.float32)
        frequency = tl.load(of + 3).to(tl.float64, bitcast=True).to(tl.float32)
        presence = tl.load(of + 4).to(tl.float64, bitcast=True).to(tl.float32)
        repeated = tl.where(x > 0, tl.div_rn(x, repetition + tl.zeros((CHUNK,), tl.float32)), x * repetition)
        x = tl.where(count != 0, repeated, x)
        x = tl.where(count > 1, x - (frequency * (count >> 1).to(tl.float32) + presence), x)
    masked = tl.load(of + 1)
    if masked >= 0:
        bits = tl.load(masks + masked * words + token // 32, mask=there, other=0)
        x = tl.where((bits >> (token % 32)) & 1 != 0, x, float("-inf"))
    tl.store(out + row * vocab + token, x, mask=there)
