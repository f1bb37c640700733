"""Paged attention against a loop in fp64 over contiguous keys, and its exactness."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from tests.kernels import cases
from tests.kernels.checks import DTYPES, assert_close, assert_same_bits, each, generator, threads

from quire.kernels import registry
from quire.kernels.attention import attention
from quire.kernels.attention.batch import AttentionShape, RaggedBatch
from quire.kernels.kv_blocks import TILE, KvView, Layout
from quire.kernels.kv_codes import KvCodes
from quire.kernels.registry import Backend
from quire.kernels.rotation import rotate_heads

SMALL = [case for case in cases.ATTENTION if not case.bench]
BITS = ((16, 16), (8, 8), (8, 4), (4, 4))
TILED = [tiled for case in SMALL for bits in BITS if (tiled := case.in_tiles(bits)) is not None]
ALL = [(case, dtype) for case in SMALL for dtype in DTYPES] + [(case, torch.bfloat16) for case in TILED]
each_case = pytest.mark.parametrize(("case", "dtype"), ALL, ids=lambda x: getattr(x, "name", str(x)))


def contiguous(kv: KvView, table: np.ndarray, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one sequence, ``[kv_heads, length, dim]`` in fp64."""
    blocks = torch.from_numpy(table[: -(-length // kv.block_size)])
    keys, values = (part.transpose(0, 1).flatten(1, 2)[:, :length].double() for part in kv.read(blocks))
    return keys, values


def oracle(made: cases.AttentionInputs) -> torch.Tensor:
    q, shape = made.q.double(), made.shape
    out = torch.zeros(*q.shape[:2], made.kv.v_head_dim, dtype=torch.float64)
    group = shape.num_heads // made.kv.num_kv_heads
    cu = made.batch.cu_seqlens_q.tolist()
    for seq, length in enumerate(made.batch.seq_lens.tolist()):
        keys, values = contiguous(made.kv, made.batch.block_table[seq], length)
        rows = slice(cu[seq], cu[seq + 1])
        position = torch.arange(length - (cu[seq + 1] - cu[seq]), length)[:, None]  # [rows, 1]
        hidden = torch.arange(length) > position  # [rows, length]
        if shape.window is not None:
            hidden |= torch.arange(length) <= position - shape.window
        for head in range(shape.num_heads):
            scores = q[rows, head] @ keys[head // group].T * shape.scale
            if shape.soft_cap is not None:
                scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
            scores.masked_fill_(hidden, -torch.inf)
            largest = scores.amax(1, keepdim=True)
            weights = (scores - largest).exp()
            total = weights.sum(1, keepdim=True)
            if made.sinks is not None:
                total = total + (made.sinks[head].double() - largest).exp()
            out[rows, head] = weights @ values[head // group] / total
    return out


def run(made: cases.AttentionInputs, backend: Backend = "reference") -> torch.Tensor:
    return attention.on(backend)(made.q, made.kv, made.batch, made.shape, made.sinks)


def part(made: cases.AttentionInputs, seq: int, first: int, last: int) -> cases.AttentionInputs:
    """The queries first … last − 1 of one sequence, as a batch of their own."""
    cu, length = made.batch.cu_seqlens_q, int(made.batch.seq_lens[seq])
    length -= int(cu[seq + 1] - cu[seq]) - last
    return dataclasses.replace(
        made,
        q=made.q[cu[seq] + first : cu[seq] + last],
        batch=RaggedBatch(
            np.array([0, last - first]), np.array([length]), made.batch.block_table[seq : seq + 1]
        ),
    )


@each_case
def test_against_fp64(case: cases.AttentionCase, dtype: torch.dtype) -> None:
    made = cases.attention_inputs(case, dtype, generator())
    expected = oracle(made)
    for backend in registry.backends("attention"):
        made.batch.plans.clear()
        assert_close("attention", run(made, backend), expected, backend)


@each("backend", registry.backends("attention"))
@each_case
def test_alone_chunked_and_batched_agree(
    case: cases.AttentionCase, dtype: torch.dtype, backend: Backend
) -> None:
    made = cases.attention_inputs(case, dtype, generator())
    with threads(1):
        expected = run(made, backend)
    with threads(2):
        made.batch.plans.clear()
        assert_same_bits(run(made, backend), expected, f"{case.name}: two threads")
    cu = made.batch.cu_seqlens_q
    for seq, (queries, _) in enumerate(case.lengths):
        whole = expected[cu[seq] : cu[seq + 1]]
        assert_same_bits(
            run(part(made, seq, 0, queries), backend), whole, f"{case.name}: sequence {seq} alone"
        )
        for size in (1, 7) if queries < 100 else (97,):
            pieces = [
                run(part(made, seq, start, min(start + size, queries)), backend)
                for start in range(0, queries, size)
            ]
            assert_same_bits(torch.cat(pieces), whole, f"{case.name}: sequence {seq} in chunks of {size}")


@each("backend", registry.backends("attention"))
@pytest.mark.parametrize("layout", ["rows", "tiles"])
def test_parts_are_added_in_order(layout: Layout, backend: Backend) -> None:
    """Parts that cancel: in another order more is left of the one between them than a bf16 hides."""
    case = cases.AttentionCase("parts that cancel", ((1, 1536),), 4, 1, 32, 32, layout=layout)
    made = cases.attention_inputs(case, torch.bfloat16, generator())
    made.q.zero_()  # all positions count alike
    values = torch.randn(1536, 1, 32, generator=generator(1))
    values[:512], values[1024:] = 4096.0, -4096.0
    positions = torch.arange(1536)
    blocks = torch.from_numpy(made.batch.block_table[0])[positions // case.block_size]
    made.kv.write(values.bfloat16(), values.bfloat16(), blocks, positions % case.block_size)
    with threads(1):
        expected = run(made, backend)
    with threads(2):
        made.batch.plans.clear()
        assert_same_bits(run(made, backend), expected, "two threads")


@each("backend", registry.backends("attention"))
@pytest.mark.parametrize(
    ("dtype", "layout"), [(torch.float32, "rows"), (torch.bfloat16, "rows"), (torch.bfloat16, "tiles")]
)
def test_where_the_blocks_lie_does_not_matter(dtype: torch.dtype, layout: Layout, backend: Backend) -> None:
    """Other block ids, and other rubbish beyond the sequence's end and in blocks that the window has left."""
    case = cases.AttentionCase("moved", ((5, 150), (1, 90)), window=40, layout=layout)
    made = cases.attention_inputs(case, dtype, generator())
    expected = run(made, backend)
    order = torch.randperm(made.kv.pieces.shape[0], generator=generator(9))
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    moved = dataclasses.replace(
        made.kv, pieces=torch.randn(made.kv.pieces.shape, generator=generator(10)).to(dtype)
    )
    table = made.batch.block_table.copy()
    for seq, (queries, length) in enumerate(case.lengths):
        first = max(0, length - queries - 40 + 1)
        keys, values = contiguous(made.kv, table[seq], length)
        table[seq] = np.where((np.arange(table.shape[1]) + 1) * 16 <= first, 0, place[table[seq]])
        for position in range(first // 16 * 16, length):
            at = torch.tensor([table[seq, position // 16]]), torch.tensor([position % 16])
            k, v = keys[:, position], values[:, position]
            if position < first:
                k, v = torch.full_like(k, 3.0), torch.full_like(v, -2.0)
            moved.write(k.unsqueeze(0).to(dtype), v.unsqueeze(0).to(dtype), *at)
    batch = RaggedBatch(made.batch.cu_seqlens_q, made.batch.seq_lens, table)
    actual = attention.on(backend)(made.q, moved, batch, made.shape, None)
    assert_same_bits(actual, expected, "moved")


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_batch_in_several_chunks(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the work is cut to bound memory, the bits stay."""
    case = cases.AttentionCase("many", tuple((1 + i % 5, 30 + 7 * i) for i in range(24)))
    made = cases.attention_inputs(case, dtype, generator())
    expected = run(made)
    for limit in (1, 1 << 15, 1 << 17):
        monkeypatch.setattr("quire.kernels.attention._CHUNK_FLOATS", limit)
        made.batch.plans.clear()
        assert_same_bits(run(made), expected, f"chunks of {limit}")


@pytest.mark.parametrize("layout", ["rows", "tiles"])
@each("backend", registry.backends("attention"))
def test_a_shape_of_a_real_model(backend: Backend, layout: Layout) -> None:
    """32 heads over 8, head_dim 64: decoding rows equal the same rows inside a chunk."""
    case = cases.AttentionCase("1B", ((40, 300),), 32, 8, 64, 64, layout=layout)
    made = cases.attention_inputs(case, torch.bfloat16, generator())
    whole = run(made, backend)
    for row in (0, 17, 39):
        assert_same_bits(run(part(made, 0, row, row + 1), backend), whole[row : row + 1], f"row {row}")


@each("backend", registry.backends("attention"))
@pytest.mark.parametrize("scale", [3.0, 0.7])
def test_maxima_that_grow_far(backend: Backend, scale: float) -> None:
    """Scores some hundred apart: a row's maximum moves in many steps, beside rows whose maximum stays."""
    case = cases.AttentionCase("steep", ((9, 700), (1, 130)), layout="tiles")
    made = cases.attention_inputs(case, torch.bfloat16, generator())
    made.q[::2] *= 8.0
    made = dataclasses.replace(made, shape=AttentionShape(made.shape.num_heads, scale))
    whole = run(made, backend)
    assert_close("attention", whole, oracle(made))
    for row in range(9):
        assert_same_bits(run(part(made, 0, row, row + 1), backend), whole[row : row + 1], f"row {row}")


@each("backend", registry.backends("attention"))
def test_a_broken_row_changes_no_bit_of_another(backend: Backend) -> None:
    """Rows of a unit are looked at together: a NaN among them must not decide for the others."""
    case = cases.AttentionCase("broken", ((9, 300),), layout="tiles")
    made = cases.attention_inputs(case, torch.bfloat16, generator())
    whole = run(made, backend)
    for broken in range(9):
        q = made.q.clone()
        q[broken] = float("nan")
        y = run(dataclasses.replace(made, q=q), backend)
        others = [row for row in range(9) if row != broken]
        assert_same_bits(y[others], whole[others], f"beside row {broken}")
        assert torch.isnan(y[broken]).all()


@each("backend", registry.backends("attention"))
def test_wide_heads_of_an_int8_cache(backend: Backend) -> None:
    """The largest sums there are: with 576 elements, products of int8 and whole int16 go beyond 32 bits."""
    case = cases.AttentionCase("wide", ((3, 40),), 2, 1, 576, 16, layout="tiles", bits=(8, 8))
    made = cases.attention_inputs(case, torch.bfloat16, generator())
    position = torch.arange(40)
    at = torch.from_numpy(made.batch.block_table[0]).long()[position // 16], position % 16
    ones = rotate_heads(torch.ones(576)) / 64  # rotated again, they are ones
    keys = ones.expand(40, 1, 576).clone()
    keys[5] *= -1.0
    made.kv.write(keys, torch.randn(40, 1, 16, generator=generator(1)), *at)
    assert made.kv.codes is not None
    assert made.kv.codes.factors is not None
    made.kv.codes.factors.fill_(1.0)
    made = dataclasses.replace(made, q=(ones * 64).expand(made.q.shape).bfloat16())
    assert_close("attention", run(made, backend), oracle(made))


def of_4_bits(codes: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """``codes [..., n]`` of two numbers each, ``groups [..., 2 (step, low), 2 (number), n]`` → ``[..., n, 2]``."""
    both = torch.stack((codes & 15, codes >> 4 & 15), dim=-2)
    return (both * groups[..., 0, :, :] + groups[..., 1, :, :]).transpose(-1, -2)


def in_8_bits(kv: KvView) -> KvView:
    """The same numbers in tiles of 8 bits."""
    assert kv.codes is not None
    dims, bits = (kv.head_dim, kv.v_head_dim), (kv.codes.k_bits, kv.codes.v_bits)
    sizes = [TILE * dim * size // 8 for dim, size in zip(dims, bits, strict=True)]
    num_groups = [-(-dim // 32) * (size == 4) for dim, size in zip(dims, bits, strict=True)]
    tiles = torch.unflatten(kv.pieces, -1, (kv.block_size // TILE, -1)).int()
    k, v, scales, k_groups, v_groups = tiles.split(
        [*sizes, 8 * TILE, *(2 * TILE * n for n in num_groups)], -1
    )
    if bits[0] == 4:  # [groups, 2, positions] → [pairs of the dim, 2, 2, positions]
        groups = torch.unflatten(k_groups, -1, (-1, 2, 1, TILE)).expand(-1, -1, -1, -1, -1, 2, -1)
        groups = groups.repeat_interleave(16, dim=3)[:, :, :, : dims[0] // 2]
        k = of_4_bits(torch.unflatten(k, -1, (-1, TILE)), groups).flatten(3)
    if bits[1] == 4:  # [groups, 2, positions] → [pairs of positions, 2, 2, dim]
        groups = torch.unflatten(v_groups, -1, (-1, 2, TILE // 2, 2)).permute(0, 1, 2, 5, 4, 6, 3)
        groups = groups.repeat_interleave(32, dim=-1)[..., : dims[1]]
        v = of_4_bits(torch.unflatten(v, -1, (TILE // 2, -1)), groups).flatten(3)
    pieces = torch.cat((k, v, scales), dim=-1).to(torch.int8).flatten(2)
    return dataclasses.replace(kv, pieces=pieces, codes=KvCodes(8, 8, kv.codes.factors))


@each("backend", registry.backends("attention"))
def test_4_bits_attend_as_the_same_numbers_in_8(backend: Backend) -> None:
    """Each level unpacks codes in its own way, for few and for many rows; heads may end within a group."""
    for bits in ((4, 4), (8, 4)):
        for head_dim, v_head_dim in ((64, 64), (80, 48), (36, 24), (34, 10)):
            case = cases.AttentionCase(
                "codes",
                ((1, 75), (20, 90), (3, 7)),
                6,
                2,
                head_dim,
                v_head_dim,
                32,
                layout="tiles",
                bits=bits,
            )
            made = cases.attention_inputs(case, torch.bfloat16, generator())
            expected = run(dataclasses.replace(made, kv=in_8_bits(made.kv)), backend)
            assert_same_bits(run(made, backend), expected, f"{bits}, heads of {head_dim} and {v_head_dim}")


@each("backend", registry.backends("attention"))
@pytest.mark.parametrize("size", [0.0, 1e-36, 1e-20, 1e-3])
def test_tiny_queries_weigh_what_they_see_alike(backend: Backend, size: float) -> None:
    """A row's scale to int16 has limits, beyond which it must still hide what the row does not see."""
    case = cases.AttentionCase("tiny", ((9, 150), (1, 70)), window=100, layout="tiles", bits=(8, 8))
    made = cases.attention_inputs(case, torch.bfloat16, generator())
    made.q[::2] *= size
    whole = run(made, backend)
    assert_close("attention", whole, oracle(made))
    for row in range(9):
        assert_same_bits(run(part(made, 0, row, row + 1), backend), whole[row : row + 1], f"row {row}")


@each("backend", registry.backends("attention"))
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("bits", BITS)
def test_many_sequences_agree_with_each_alone(
    bits: tuple[int, int], window: int | None, backend: Backend
) -> None:
    """Few rows of many sequences take several KV heads in turn (attention_plan.h)."""
    lengths = tuple((1 + 3 * (i % 2) + 40 * (i == 5), 20 + 53 * i) for i in range(12))
    for heads, kv_heads in ((12, 4), (6, 3), (20, 1)):
        case = cases.AttentionCase("many", lengths, heads, kv_heads, window=window, layout="tiles", bits=bits)
        made = cases.attention_inputs(case, torch.bfloat16, generator())
        with threads(1):
            whole = run(made, backend)
            alone = torch.cat([run(part(made, seq, 0, n), backend) for seq, (n, _) in enumerate(lengths)])
        assert_close("attention", whole, oracle(made))
        assert_same_bits(whole, alone, "alone")
        with threads(2):
            made.batch.plans.clear()
            assert_same_bits(run(made, backend), alone, "two threads")


@each("backend", registry.backends("attention"))
@pytest.mark.parametrize("window", [None, 600])
@pytest.mark.parametrize("bits", BITS)
def test_rows_that_take_turns_have_their_own_bits(
    bits: tuple[int, int], window: int | None, backend: Backend
) -> None:
    """Units of 16 tokens share each split of a long context; alone, a unit goes through all of them."""
    lengths = ((200, 1400), (1, 700), (40, 530))
    case = cases.AttentionCase("turns", lengths, 6, 2, window=window, layout="tiles", bits=bits)
    made = cases.attention_inputs(case, torch.bfloat16, generator())
    with threads(1):
        whole = run(made, backend)
        pieces = [
            run(part(made, seq, first, min(first + 16, queries)), backend)
            for seq, (queries, _) in enumerate(lengths)
            for first in range(0, queries, 16)
        ]
    assert_close("attention", whole, oracle(made))
    assert_same_bits(whole, torch.cat(pieces), "16 tokens at a time")
    with threads(2):
        made.batch.plans.clear()
        assert_same_bits(run(made, backend), whole, "two threads")


@each("backend", registry.backends("attention"))
def test_scale_is_applied(backend: Backend) -> None:
    made = cases.attention_inputs(SMALL[3], torch.float32, generator())
    flat = dataclasses.replace(made, shape=AttentionShape(made.shape.num_heads, 0.0))
    assert_close("attention", run(flat, backend), oracle(flat))


@each("backend", registry.backends("attention"))
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_a_cache_of_another_dtype(dtype: torch.dtype, kv_dtype: torch.dtype, backend: Backend) -> None:
    made = cases.attention_inputs(SMALL[3], kv_dtype, generator())
    made = dataclasses.replace(made, q=made.q.to(dtype))
    assert_close("attention", run(made, backend), oracle(made))


@each("backend", registry.backends("attention"))
def test_queries_that_are_a_slice(backend: Backend) -> None:
    """As layers pass them: the first heads of a fused tensor."""
    made = cases.attention_inputs(SMALL[3], torch.bfloat16, generator())
    fused = torch.cat((made.q, torch.full_like(made.q, 7.0)), dim=1)
    sliced = dataclasses.replace(made, q=fused[:, : made.q.shape[1]])
    assert_same_bits(run(sliced, backend), run(made, backend), "slice")


@pytest.mark.skipif(len(registry.backends("attention")) == 1, reason="no native version here")
def test_a_recorded_call_reads_the_batch_of_its_replay() -> None:
    """Two sequences, then, in the same memory, one with as many queries in all and a shorter table."""
    from quire import _native as native

    level = next(backend for backend in registry.backends("attention") if backend != "reference")
    made = cases.attention_inputs(
        cases.AttentionCase("replay", ((2, 90), (3, 70))), torch.bfloat16, generator()
    )
    batch, table = made.batch, made.batch.block_table
    tape = native.Tape()
    tape.start(tokens=5, logits=1)
    y = run(made, level)
    tape.stop()
    other = RaggedBatch(np.array([0, 5]), np.array([41]), table[1:, :3].copy())
    expected = run(dataclasses.replace(made, batch=other), level)
    batch.extents[:] = (1, 3)
    batch.cu_seqlens_q[:2] = (0, 5)
    batch.seq_lens[0] = 41
    table.reshape(-1)[:3] = other.block_table[0]
    tape.run(2, tokens=5, logits=1)
    assert_same_bits(y, expected, "replayed")
