"""Paged attention of a GPU against the loop in fp64; the invariant version's bits in any batch and chunk."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.kernels import cases
from tests.kernels.checks import DTYPES, assert_close, assert_same_bits, generator
from tests.kernels.test_attention import SMALL, oracle, part, run
from tests.kernels.triton.device import WARNINGS, on_device

from quire.kernels.attention.batch import LayerKind, RaggedBatch, StepLimits
from quire.kernels.attention.triton_plan import most_works, plan_works
from quire.kernels.kv_blocks import view_layer
from quire.kernels.registry import GPU_KERNELS, Backend

pytestmark = WARNINGS
SLOW_HERE = {"splits", "splits of a chunk", "chunks", "window", "head of 80", "head of 96", "block of 5"}
QUICK_BITS = {"mqa, group of 9", "sinks, window", "latent"}


def slow_unless(quick: bool, *values: object) -> object:
    return pytest.param(*values, marks=() if quick else pytest.mark.slow)


def in_8_bits(case: cases.AttentionCase, *, fp8: bool) -> cases.AttentionCase:
    return replace(case, name=f"{case.name}, {'fp8' if fp8 else 'int8'}", int8=not fp8, fp8=fp8)


EIGHT = [
    in_8_bits(case, fp8=fp8)
    for case in SMALL
    if case.name in ("decode", "sinks, window", "soft cap", "head of 96")
    for fp8 in (False, True)
]
EACH = [
    slow_unless(dtype == torch.float32 and case.name not in SLOW_HERE, case, dtype)
    for case in SMALL
    for dtype in DTYPES
] + [slow_unless("sinks" in case.name, case, torch.bfloat16) for case in EIGHT]


@pytest.mark.parametrize("backend", GPU_KERNELS)
@pytest.mark.parametrize(("case", "dtype"), EACH, ids=lambda x: getattr(x, "name", str(x)))
def test_against_fp64(case: cases.AttentionCase, dtype: torch.dtype, backend: Backend) -> None:
    made = cases.attention_inputs(case, dtype, generator())
    y = run(on_device(made), backend)
    assert_close("attention", y.cpu(), oracle(made))


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        slow_unless(case.name in QUICK_BITS and dtype == torch.float32, case, dtype)
        for case in SMALL
        for dtype in DTYPES
        if case.lengths
    ],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_invariant_bits_are_those_of_a_sequence_alone(case: cases.AttentionCase, dtype: torch.dtype) -> None:
    made = on_device(cases.attention_inputs(case, dtype, generator()))
    expected = run(made, "invariant")
    cu = made.batch.cu_seqlens_q
    for seq, (queries, _) in enumerate(case.lengths):
        whole = expected[cu[seq] : cu[seq + 1]]
        assert_same_bits(run(part(made, seq, 0, queries), "invariant"), whole, f"{case.name}: {seq} alone")
        size = max(1, min(7, queries // 2))
        for start in {0, size, queries - 1 - (queries - 1) % size}:
            rows = slice(start, min(start + size, queries))
            piece = run(part(made, seq, rows.start, rows.stop), "invariant")
            assert_same_bits(piece, whole[rows], f"{case.name}: {seq} from {start}")


def test_rubbish_that_no_sequence_sees_changes_nothing() -> None:
    """NaN in blocks that the window has left, behind the sequence's end and in blocks of others: nothing is cleared."""
    case = cases.AttentionCase("rubbish", ((5, 75), (1, 40)), window=20)
    made = cases.attention_inputs(case, torch.float32, generator())
    expected = {backend: run(on_device(made), backend) for backend in GPU_KERNELS}
    for block in range(made.kv.pieces.shape[0]):
        for offset in range(case.block_size):
            seen = any(
                made.batch.block_table[seq, place // 16] == block and place % 16 == offset
                for seq, (queries, length) in enumerate(case.lengths)
                for place in range(max(0, length - queries - 19), length)
            )
            if not seen:
                made.kv.keys[block, :, offset] = torch.nan
                made.kv.values[block, :, offset] = torch.nan
    made.batch.plans.clear()
    for backend in GPU_KERNELS:
        assert_same_bits(run(on_device(made), backend), expected[backend], backend)


@pytest.mark.parametrize("group", [1, 4, 16, 24, 128])
def test_a_graph_has_room_for_every_step_of_its_size(group: int) -> None:
    """Steps of at most so many tokens and sequences, of one token each or mixed."""
    rng = np.random.default_rng(20261122)
    kv = view_layer(torch.zeros(2, 2 * 16 * 32), 0, num_kv_heads=2, block_size=16, head_dim=16, v_head_dim=16)
    for _ in range(60):
        invariant, window, units = bool(rng.integers(2)), rng.choice([None, 50]), int(rng.choice([1, 132]))
        seqs, longest = int(rng.integers(1, 20)), int(rng.choice([60, 1500]))
        q_lens = np.ones(seqs, np.int64) if rng.integers(2) else rng.integers(1, 40, seqs)
        mixed = not invariant and bool((q_lens > 1).any())
        if invariant:
            q_lens[:] = 1
        seq_lens = np.minimum(q_lens + rng.integers(0, longest, seqs), longest)
        batch = RaggedBatch(np.concatenate(([0], np.cumsum(q_lens))), seq_lens, np.zeros((seqs, 1), np.int64))
        kind, limits = LayerKind(group, window, kv), StepLimits(int(q_lens.sum()), seqs, longest)
        works = plan_works(batch, kind, units=units, invariant=invariant, mixed=mixed)
        most = most_works(kind, limits, units=units, invariant=invariant)
        assert works is not None
        for work, (items, tiles) in zip(works, most, strict=True):
            assert len(work.items) <= items, (group, q_lens, seq_lens)
            assert len(work.tiles) <= tiles, (group, q_lens, seq_lens)
