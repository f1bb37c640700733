"""Attention whose keys lie in stripes: the merged parts against fp64, and the exactness of each part."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from tests.kernels import cases
from tests.kernels.checks import assert_close, assert_same_bits, generator, threads
from tests.kernels.test_attention import ALL, each_case, oracle, part

from quire.kernels import registry
from quire.kernels.attention.batch import RaggedBatch
from quire.kernels.attention.striped import merge_attention, partial_attention
from quire.kernels.registry import Backend
from quire.parallel.stripe import Stripe

LEVELS = registry.backends("partial_attention")
BEST = next((level for level in registry.NATIVE_LEVELS if level in LEVELS), "reference")


def each_backend(*default: Backend) -> pytest.MarkDecorator:
    levels = [pytest.param(each, marks=() if each in default else pytest.mark.slow) for each in LEVELS]
    return pytest.mark.parametrize("backend", levels)


def seen_by(made: cases.AttentionInputs, rank: int, ranks: int) -> cases.AttentionInputs:
    """What ``rank`` sees: every ``ranks``-th block of each sequence."""
    batch, kv = made.batch, made.kv
    table = np.pad(batch.block_table, ((0, 0), (0, -batch.block_table.shape[1] % ranks)))[:, rank::ranks]
    return dataclasses.replace(
        made,
        kv=dataclasses.replace(kv, stripe=Stripe(rank, ranks, kv.block_size)),
        batch=RaggedBatch(batch.cu_seqlens_q, batch.seq_lens, np.ascontiguousarray(table)),
    )


def parts_of(made: cases.AttentionInputs, ranks: int, backend: Backend) -> torch.Tensor:
    """``[num_tokens, ranks, num_heads, v_head_dim + 2]``"""
    run = partial_attention.on(backend)
    seen = [seen_by(made, rank, ranks) for rank in range(ranks)]
    return torch.stack([run(made.q, each.kv, each.batch, each.shape) for each in seen], dim=1)


def merge(made: cases.AttentionInputs, parts: torch.Tensor, backend: Backend) -> torch.Tensor:
    merges = registry.backends("merge_attention")
    return merge_attention.on(backend if backend in merges else "avx512")(parts, made.sinks, made.q.dtype)


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))])
@each_backend(BEST)
@each_case
def test_merged_parts_against_fp64(
    case: cases.AttentionCase, dtype: torch.dtype, backend: Backend, ranks: int
) -> None:
    made = cases.attention_inputs(case, dtype, generator())
    assert_close("attention", merge(made, parts_of(made, ranks, backend), backend), oracle(made))


@each_backend(BEST)
@each_case
def test_parts_of_alone_chunked_and_batched_agree(
    case: cases.AttentionCase, dtype: torch.dtype, backend: Backend
) -> None:
    made = cases.attention_inputs(case, dtype, generator())
    with threads(1):
        expected = parts_of(made, 2, backend)
    with threads(2):
        assert_same_bits(parts_of(made, 2, backend), expected, f"{case.name}: two threads")
    cu = made.batch.cu_seqlens_q
    for seq, (queries, _) in enumerate(case.lengths):
        whole = expected[cu[seq] : cu[seq + 1]]
        for size in (queries, 1, 7) if 0 < queries < 100 else (97,):
            pieces = [
                parts_of(part(made, seq, start, min(start + size, queries)), 2, backend)
                for start in range(0, queries, size)
            ]
            assert_same_bits(torch.cat([*pieces, whole[:0]]), whole, f"{case.name}: sequence {seq} by {size}")


@pytest.mark.parametrize("backend", registry.backends("merge_attention"))
def test_a_merged_row_does_not_depend_on_its_place(backend: Backend) -> None:
    """Rows of any part of a batch, and a rank that saw nothing."""
    parts = torch.randn(37, 3, 5, 21, generator=generator())
    parts[..., -2] = parts[..., -2].abs() + 1
    parts[::4, 2, :, :-1] = 0
    parts[::4, 2, :, -1] = -1e30
    sinks = torch.randn(5, generator=generator())
    run = merge_attention.on(backend)
    for dtype in (torch.float32, torch.bfloat16):
        whole = run(parts, sinks, dtype)
        for first, last in ((0, 1), (1, 37), (5, 12), (36, 37)):
            found = run(parts[first:last].contiguous(), sinks, dtype)
            assert_same_bits(found, whole[first:last], f"rows {first} to {last}")
        blind = run(parts[::4, :2].contiguous(), sinks, dtype)
        assert_same_bits(blind, whole[::4], "without the rank that saw nothing")


def test_every_position_is_on_one_rank() -> None:
    for count, size in ((1, 4), (2, 1), (2, 8), (3, 5)):
        stripes = [Stripe(index, count, size) for index in range(count)]
        positions = np.arange(4 * count * size + 3)
        assert (sum(stripe.has(positions).astype(int) for stripe in stripes) == 1).all()
        for stripe in stripes:
            has = stripe.has(positions)
            assert (stripe.below(positions) == np.cumsum(has) - has).all()
            # The own number leads to the slot: the row of the block table, and the offset in the rank's block.
            own = stripe.below(positions)[has]
            assert (own // size == positions[has] // (count * size)).all()
            assert (own % size == positions[has] % size).all()
    assert ALL
