"""The cases of recurrent layers: ragged sequences, some fresh, with checkpoints inside.

The recurrence itself has the same bits at every level."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from tests.kernels.arm.recorder import LEVEL, THREADS, Case, Place
from tests.kernels.arm.write_cases import BF16, CLOSE, F32, name_of, random

NUM_SLOTS = 7
# Tokens of each sequence: all decode; chunks beside decodes, enough for several threads.
LENGTHS = ((1,), (1, 1, 1), (5, 1, 40, 23))


def batch_of(case: Case, lengths: tuple[int, ...]) -> tuple[Place, ...]:
    """Sequences in slots 1, 2 …, of which every second begins from zeros; the last token of each is kept elsewhere."""
    count = len(lengths)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    saves = torch.tensor([[0, (lengths[0] + 1) // 2, NUM_SLOTS - 1], [count - 1, lengths[-1], 0]])
    if count == 1 and lengths[0] == 1:
        saves = saves[1:].contiguous()
    fresh = torch.arange(count) % 2
    tensors = ends, torch.arange(1, count + 1), fresh, saves, torch.tensor([count, len(saves)])
    return tuple(case.buffer(tensor) for tensor in tensors)


def convolutions() -> Iterator[Case]:
    for lengths, dtype, (channels, kernel), is_gated in product(
        LENGTHS, (BF16, F32), ((64, 4), (300, 3)), (False, True)
    ):
        case = Case(f"convolution of {lengths}, {channels} channels, {name_of(dtype)}, gated {is_gated}")
        tokens = sum(lengths)
        x = case.buffer(random(tokens, 3 * channels, dtype=dtype))
        gates: tuple[Place | int, Place | int] = (x.at(channels), x.at(2 * channels)) if is_gated else (0, 0)
        weight, bias = case.buffer(random(kernel, channels)), case.buffer(random(channels, seed=1))
        past = case.buffer(random(NUM_SLOTS, kernel - 1, channels, seed=2))
        y = case.zeros(tokens, channels, dtype=dtype)
        case.call("causal_conv", THREADS, LEVEL, dtype is BF16, x, 3 * channels, *gates, weight,
                  0 if is_gated else bias, past, (kernel - 1) * channels, y, *batch_of(case, lengths), tokens, channels,
                  kernel)  # fmt: skip
        case.bits(past)
        case.close(y, 1e-6, CLOSE[dtype])
        yield case


def inputs() -> Iterator[Case]:
    """What goes into a scan: of the delta rule, and of Mamba-2's."""
    for tokens, dtype, (k_heads, v_heads, k_dim) in product((1, 23), (BF16, F32), ((1, 2, 8), (2, 4, 32))):
        case = Case(f"inputs of scans, {tokens} tokens, {v_heads} heads of {k_dim}, {name_of(dtype)}")
        keys = k_heads * k_dim
        rows, width = case.buffer(random(tokens, 2 * keys + 24, dtype=dtype)), 2 * keys + 24
        a, b = (case.buffer(random(tokens, v_heads, dtype=dtype, seed=seed)) for seed in (1, 2))
        rate, shift = case.buffer(-random(v_heads).abs()), case.buffer(random(v_heads, seed=1))
        results = [
            case.zeros(tokens, 2, *shape) for _ in range(2) for shape in ((k_heads, k_dim), (v_heads,))
        ]
        case.call("delta_inputs", THREADS, LEVEL, dtype is BF16, rows, width, a, v_heads, b, v_heads, rate, shift,
                  *results[:2], tokens, k_heads, v_heads, k_dim, 1e-6)  # fmt: skip
        case.call("mamba_inputs", THREADS, LEVEL, dtype is BF16, rows, width, a, v_heads, rate, shift, *results[2:],
                  tokens, k_heads, v_heads, k_dim, 24, 0.7, 1e-3, 0.1)  # fmt: skip
        f, shifts = case.buffer(random(tokens, keys, dtype=dtype, seed=3)), case.buffer(random(keys, seed=4))
        for floor in (0.0, -5.0):
            shapes = (3, k_heads, k_dim), (k_heads,)
            results += (of_channels := [case.zeros(tokens, *shape) for shape in shapes])
            case.call("channel_inputs", THREADS, LEVEL, dtype is BF16, rows, width, f, keys, b, v_heads, rate, shifts,
                      *of_channels, tokens, k_heads, k_dim, 1e-6, floor < 0, floor)  # fmt: skip
        for result in results:
            case.close(result, 1e-6, CLOSE[F32])
        yield case


def scans() -> Iterator[Case]:
    kinds = "delta rule", "rule with a decay per channel", "Mamba-2's scan"
    for lengths, dtype, (k_heads, v_heads, k_dim, v_dim), name in product(
        LENGTHS, (BF16, F32), ((1, 2, 8, 24), (2, 4, 32, 40)), kinds
    ):
        is_mamba, parts = name == kinds[2], 3 if name == kinds[1] else 2
        k_heads = v_heads if parts == 3 else k_heads
        case = Case(f"{name} of {lengths}, {v_heads} heads of {k_dim} x {v_dim}, {name_of(dtype)}")
        tokens, width = sum(lengths), v_heads * v_dim
        qk = case.buffer(random(tokens, parts, k_heads, k_dim, scale=k_dim**-0.5))
        gates = case.buffer(torch.sigmoid(random(tokens, 4 - parts, v_heads)))
        skip, v = case.buffer(random(v_heads, seed=3)), case.buffer(random(tokens, width + 8, dtype=dtype))
        state = case.buffer(random(NUM_SLOTS, v_heads, k_dim, v_dim, seed=4))
        y = case.zeros(tokens, width, dtype=dtype)
        case.call("gated_delta_rule", THREADS, LEVEL, dtype is BF16, qk, gates, skip if is_mamba else 0, v, width + 8,
                  state, v_heads * k_dim * v_dim, y, *batch_of(case, lengths), tokens, k_heads, v_heads, k_dim,
                  v_dim, parts)  # fmt: skip
        case.bits(y)
        case.bits(state)
        yield case


def norms() -> Iterator[Case]:
    for tokens, (heads, size), dtype in product((1, 19), ((3, 40), (4, 64)), (BF16, F32)):
        case = Case(f"gated norms of {tokens} rows, {heads} x {size}, {name_of(dtype)}")
        width = heads * size
        x, z = (
            case.buffer(random(tokens, width, dtype=dtype)),
            case.buffer(random(tokens, width, dtype=dtype, seed=1)),
        )
        weight = case.buffer(random(width, seed=2))
        results = [case.zeros(tokens, width, dtype=dtype) for _ in range(5)]
        for index, is_plain in enumerate((False, True)):
            case.call("gated_norm", THREADS, LEVEL, dtype is BF16, x, width, z, width, weight, results[index], tokens,
                      heads, size, 1e-6, is_plain)  # fmt: skip
        for index, (is_normed, gate_first) in enumerate(
            ((True, True), (True, False), (False, True)), start=2
        ):
            case.call("group_norm", THREADS, LEVEL, dtype is BF16, x, width, z, width, weight if is_normed else 0,
                      results[index], tokens, heads, size, 1e-5, 1.3, gate_first)  # fmt: skip
        for result in results:
            case.close(result, 1e-6, CLOSE[dtype])
        yield case


def recurrent_cases() -> list[Case]:
    return [case for make in (convolutions, inputs, scans, norms) for case in make()]
