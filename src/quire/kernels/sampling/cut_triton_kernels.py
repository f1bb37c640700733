"""top_k and top_p on a GPU, without a sort and without the host: what they keep is all ids above a score, and of those
that have just that score the lowest ids.

The score is found bit by bit: the largest for which what is at least as large counts top_k ids, or weighs top_p. A
first launch looks at a row's best 1,024 logits, one tile; rows that need more are found there, and only they read the
whole vocabulary (32 times) in a second one. Masses are added in this order and not the reference's, so that a nucleus
may end at another id where two masses agree to the last of float64's digits.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

TRUNCATED = tl.constexpr(2)  # of `columns`
SHORT = tl.constexpr(-2)  # in the place of a cut: the candidates did not suffice
NOBODY = tl.constexpr(0x7FFFFFFF)


@triton.jit
def key_of(score):
    """fp32 as int64 ≥ 0 in the same order."""
    bits = score.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
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
def tile_of(values, start, num, top, temperature, floor, CHUNK: tl.constexpr):
    """(keys, scores, which may be drawn) of the values from ``start`` on."""
    place = start + tl.arange(0, CHUNK)
    x = tl.load(values + place, mask=place < num, other=float("-inf"))
    score = tl.div_rn(x - top, temperature + tl.zeros((CHUNK,), tl.float32))
    possible = (place < num) & (score.to(tl.float64) >= floor) & (score > float("-inf"))
    return key_of(score), score, possible


@triton.jit
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
def largest_key(values, num, wanted, top, temperature, floor, BY_MASS: tl.constexpr, CHUNK: tl.constexpr):
    """The largest key at which there is as much as ``wanted``; 0 where there is never so much."""
    found = (wanted * 0.0).to(tl.int64)
    for bit in range(32):
        tried = found | ((found * 0 + 1) << (31 - bit))
        count, mass = above(values, num, tried, top, temperature, floor, CHUNK)
        enough = mass if BY_MASS else count
        found = tl.where(enough >= wanted, tried, found)
    return found


@triton.jit
def weight_of(key):
    """The mass of one id whose score has ``key``."""
    bits = (key - 2147483648).to(tl.int32)
    return exp_of((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)).to(tl.float64)


@triton.jit
def cut_rows(
    values, values_stride, num, logits, stride, vocab, tops, chunks, facts, cuts,
    WIDE: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Program (row): the least key that is kept, and the last id that is kept of those that have it.

    ``values``: candidates, or with WIDE the logits again. ``facts [rows, 8]`` and ``tops`` as `draw_chunks` has them.
    """
    row = tl.program_id(0).to(tl.int64)
    facts += row * 8
    if tl.load(facts) & TRUNCATED == 0:
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
    cut, kept = row * 0, row * 0 + NOBODY
    short = (top_k < vocab) & (top_k > num)
    if top_k < vocab:
        cut = largest_key(values, num, top_k.to(tl.float64), top, temperature, floor, False, CHUNK)
        count, total = above(values, num, cut + 1, top, temperature, floor, CHUNK)
        kept = top_k - count.to(tl.int64)
        total += tl.where(cut > 0, kept.to(tl.float64) * weight_of(cut), 0.0)
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
        kept = tl.where(nucleus > cut, places, tl.where(nucleus == cut, tl.minimum(kept, places), kept))
        cut = tl.maximum(nucleus, cut)
    last = row * 0 + vocab
    seen = row * 0
    for chunk in range(tl.cdiv(vocab, CHUNK)):
        keys, _, possible = tile_of(logits, chunk * CHUNK, vocab, top, temperature, floor, CHUNK)
        equal = (possible & (keys == cut)).to(tl.int32)
        counted = tl.cumsum(equal, 0).to(tl.int64) + seen
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        last = tl.minimum(last, tl.min(tl.where((equal > 0) & (counted == kept), token, NOBODY), 0))
        seen += tl.sum(equal, 0)
    tl.store(cuts + row * 2, tl.where(short, row * 0 + SHORT, cut))
    tl.store(cuts + row * 2 + 1, last)
