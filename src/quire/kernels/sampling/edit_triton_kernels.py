"""Bias, penalties and masks on the way from logits to a draw, in one pass: `sampling.penalties` bit for bit."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def edit_rows(logits, stride, out, facts, counts, masks, bias_ids, biases, vocab, words, CHUNK: tl.constexpr):
    """Program (row, chunk) writes ``out [rows, vocab]``. No product may be fused with a sum.

    ``facts [rows, 8]`` int64: row of ``counts`` or −1, row of ``masks`` or −1, the bits of repetition, frequency and
    presence as float64, first bias and behind the last. ``counts``: 2 · times drawn, + 1 if the prompt has the id.
    ``masks [rows masked, words]``: a bit an id that is allowed. ``biases``: the bits of float64.
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
