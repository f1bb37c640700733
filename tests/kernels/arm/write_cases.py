"""The cases of every native op: small shapes with the tails, and a few that are large enough for several threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import torch
from tests.kernels.arm.recorder import LEVEL, THREADS, Case, Place
from torch import Tensor

from quire import _native
from quire.kernels.activation import ALL_KINDS, UNGATED
from quire.kernels.kv_blocks import TILE
from quire.kernels.kv_codes import KvCodes
from quire.kernels.quantized_rows import num_blocks, num_parts, padded_size
from quire.kernels.sampling import COLUMNS, LOGPROBS, MIN_P, RANDOM, TRUNCATED
from quire.quant.ggml_codebooks import FP4_LEVELS, IQ4_LEVELS
from quire.weight_format import RowFormat, WeightFormat

BF16, F32 = torch.bfloat16, torch.float32
CLOSE = {BF16: 2**-7, F32: 2e-6}  # relative: one rounding to the type, or a few of fp32


def random(*shape: int, dtype: torch.dtype = F32, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64, seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def linears() -> Iterator[Case]:
    shapes = [
        (1, 64, 128),
        (2, 40, 64),
        (5, 96, 100),
        (7, 33, 67),
        (11, 70, 64),
        (13, 72, 256),
        (26, 130, 516),
    ]
    for (rows, n, k), dtype, out in product(shapes, (BF16, F32), (BF16, F32)):
        if dtype is F32 and out is BF16:
            continue
        case = Case(f"linear {name_of(dtype)} to {name_of(out)}, {rows} x {n} x {k}")
        kind = name_of(dtype)
        x, w = case.buffer(random(rows, k, dtype=dtype)), case.buffer(random(n, k, dtype=dtype, seed=1))
        bias: Place | int = case.buffer(random(n)) if rows % 2 else 0
        packed = case.zeros(_native.packed_elements(kind, n, k), dtype=dtype)
        y, alone = case.zeros(rows, n, dtype=out), case.zeros(rows, n, dtype=out)
        case.call("pack", THREADS, kind, w, n, k, 0, packed)

        def call(rows: int, x: Place, y: Place, *, case: Case = case, k: int = k, n: int = n, packed: Place = packed,
                 bias: Place | int = bias, kind: str = kind, out: torch.dtype = out) -> None:  # fmt: skip
            case.call("linear", THREADS, LEVEL, kind, x, k, packed, bias, y, n, name_of(out), rows, n, k)

        call(rows, x, y)
        for row in range(rows):
            call(1, x.at(row * k), alone.at(row * n))
        case.bits(packed)
        case.same(y, alone)
        case.close(y, 0.02 if out is BF16 else 1e-3, CLOSE[out])
        if dtype is F32:
            case.bits(y, arm="neon_i8mm", x86="avx2")
        case.bits(y, arm="neon", x86="avx2")  # the same fused operations in the same order
        yield case


# Forms of weights in units (csrc/cpu/quantized.h): bits, + 16 or 32 for a table of levels, + 64 for nested scales,
# + 128 for powers of two.
UNITS = (
    (5, 32, False), (5, 32, True), (64 + 2, 16, True), (64 + 3, 16, False), (64 + 4, 32, True), (64 + 5, 32, True),
    (64 + 6, 16, False), (16 + 4, 32, False), (64 + 16 + 4, 32, False), (128 + 32 + 4, 32, False),
)  # fmt: skip
FORMATS = [
    (8, 0, False, 0),
    (8, 0, False, 16),
    (8, 0, False, 32),
    (8, 0, False, 64),
    (8, 0, True, 0),
    (8, 32, False, 0),
    (8, 64, True, 0),
    (4, 32, False, 0),
    (4, 64, True, 0),
    (4, 16, False, 0),
    (4, 16, False, 64),
    (8, 16, True, 0),
    (4, 128, True, 0),
    *((form, group, has_offset, 0) for form, group, has_offset in UNITS),
]


def quantized_weight(
    case: Case, bits: int, group: int, has_offset: bool, n: int, k: int
) -> tuple[Place, ...]:
    """Packed codes, and the scales and offsets of columns (0 where there are none)."""
    two_level, groups = bits == 4 and group == 16, -(-k // group) if group else 1
    panels = -(-n // 32)
    if (bits, group, has_offset) in UNITS:
        return *weight_in_units(case, bits, group, has_offset, n, k), 0  # type: ignore[return-value]
    q = case.buffer(integers(-128 if bits == 8 else -8, 128 if bits == 8 else 8, n, k, dtype=torch.int8))
    scale: Place | int = 0
    if two_level:
        scale = case.buffer(integers(0, 16, n, groups, dtype=torch.uint8))
    elif group:
        scale = case.buffer(random(n, groups, dtype=torch.float16, scale=0.1))
    offset = case.buffer(random(n, groups, dtype=torch.float16)) if group and has_offset else 0
    packed = case.zeros(panels * _native.quantized_panel_bytes(bits, group, has_offset, k), dtype=torch.uint8)
    case.call("pack_quantized", THREADS, bits, group, has_offset, q, scale, offset, 0, 0, n, k, 0, packed)
    columns = case.buffer(random(panels * 32, scale=0.01).abs())
    offsets = case.buffer(random(panels * 32, scale=0.1)) if has_offset and not group else 0
    return packed, columns, offsets  # type: ignore[return-value]


def weight_in_units(
    case: Case, form: int, group: int, has_offset: bool, n: int, k: int
) -> tuple[Place, Place]:
    """Packed codes, and the powers of two of columns."""
    bits, table, nested, groups = form % 16, form // 16 % 4, form // 64 == 1, -(-k // group)
    levels = {0: torch.arange(1 << bits) - (0 if has_offset else 1 << bits - 1), 1: torch.tensor(IQ4_LEVELS)}
    levels[2] = torch.tensor(FP4_LEVELS)
    q = case.buffer(levels[table].to(torch.int8)[integers(0, 1 << bits, n, k)])
    offset: Place | int = 0
    outer: list[Place | int] = [0, 0]
    if form // 64 == 0:
        scale = case.buffer(random(n, groups, dtype=torch.float16, scale=0.1))
        offset = case.buffer(random(n, groups, dtype=torch.float16)) if has_offset else 0
    elif nested:
        scale = case.buffer(integers(0, 16, n, groups, dtype=torch.int8) - (0 if bits == 2 else 7))
        offset = case.buffer(integers(0, 16, n, groups, dtype=torch.uint8)) if has_offset else 0
        outer[0] = case.buffer(random(n, -(-k // 256), dtype=torch.float16, scale=0.02))
        outer[1] = case.buffer(random(n, -(-k // 256), dtype=torch.float16, scale=0.1)) if has_offset else 0
    else:
        scale = case.buffer(integers(118, 124, n, groups, dtype=torch.uint8))
    packed = case.zeros(
        -(-n // 32) * _native.quantized_panel_bytes(form, group, has_offset, k), dtype=torch.uint8
    )
    case.call("pack_quantized", THREADS, form, group, has_offset, q, scale, offset, *outer, n, k, 0, packed)
    return packed, case.buffer(random(-(-n // 32) * 32, scale=0.01).abs())


def quantized_rows(
    case: Case, x: Place, rows: int, k: int, format: RowFormat, dtype: torch.dtype
) -> tuple[Place, ...]:
    stride = -(-padded_size(k, format.group) // 64) * 64
    q, scale = case.zeros(rows, stride, dtype=torch.int8), case.zeros(rows, num_blocks(k, format))
    sums = case.zeros(rows, num_parts(k, format), dtype=torch.int32)
    words = (each or 0 for each in format)
    case.call(
        "quantize_rows", THREADS, LEVEL, dtype is BF16, x, k, rows, k, q, stride, scale, sums, *words
    )  # fmt: skip
    return q, scale, sums


def quantized() -> Iterator[Case]:
    for (bits, group, has_offset, rotation), (rows, n, k) in product(
        FORMATS, [(1, 64, 128), (2, 40, 100), (5, 96, 128), (9, 33, 192), (26, 130, 320), (14, 70, 68)]
    ):
        if rotation and k % rotation:
            continue
        name = f"linear of form {bits} in groups of {group}, offset {has_offset}, rotation {rotation}"
        case = Case(f"{name}, {rows} x {n} x {k}")
        dtype = BF16 if rows % 2 else F32
        x = case.buffer(random(rows, k, dtype=dtype))
        format = WeightFormat(
            "int4" if bits == 4 else "int8", group or None, has_offset, rotation or None
        ).rows
        q, scale, sums = quantized_rows(case, x, rows, k, format, dtype)
        packed, columns, offsets = quantized_weight(case, bits, group, has_offset, n, k)
        bias: Place | int = case.buffer(random(n)) if rows % 2 else 0
        y, alone = case.zeros(rows, n, dtype=dtype), case.zeros(rows, n, dtype=dtype)
        stride, blocks, parts = (each.tensor.shape[1] for each in (q, scale, sums))

        def call(rows: int, row: int, y: Place) -> None:
            case.call(  # noqa: B023
                "quantized_linear", THREADS, LEVEL, bits, group, has_offset, q.at(row * stride), stride,  # noqa: B023
                scale.at(row * blocks), sums.at(row * parts), packed, columns, offsets, bias, dtype is BF16, y, n,  # noqa: B023
                rows, n, k,  # noqa: B023
            )  # fmt: skip

        call(rows, 0, y)
        for row in range(rows):
            call(1, row, alone.at(row * n))
        ids, taken = case.buffer(integers(0, n, 5)), case.zeros(5, k, dtype=dtype)
        case.call("take_quantized_rows", THREADS, LEVEL, bits, group, has_offset, rotation, packed, columns, offsets,
                  ids, dtype is BF16, taken, 5, k)  # fmt: skip
        case.same(y, alone)
        for each in (q, scale, sums, packed, y, taken):
            case.bits(each)
        yield case


def weights() -> Iterator[Case]:
    for (bits, group), k, dtype in product(
        [(8, 200), (8, 32), (4, 32), (4, 64), (4, 16)], (200, 192), (BF16, F32)
    ):
        rows, rotation = 9, 64 if k == 192 else 0
        groups, two_level = -(-k // group), group == 16
        case = Case(f"weights {name_of(dtype)} to int{bits} in groups of {group}, rotation {rotation}")
        w, q = case.buffer(random(rows, k, dtype=dtype)), case.zeros(rows, k, dtype=torch.int8)
        scale = case.zeros(rows, 1 if two_level else groups)
        multiplier = case.zeros(rows, groups, dtype=torch.uint8)
        case.call("quantize_weights", THREADS, LEVEL, bits, group, dtype is BF16, w, k, rows, k, rotation, q, scale,
                  multiplier if two_level else 0)  # fmt: skip
        for each in (q, scale, multiplier):
            case.bits(each)
        yield case


def norms() -> Iterator[Case]:
    for dtype, size, residual, int8 in product((BF16, F32), (64, 100), (False, True), (False, True)):
        tokens = 17
        case = Case(f"norm {name_of(dtype)} of {size}, residual {residual}, int8 {int8}")
        x, weight = case.buffer(random(tokens, size, dtype=dtype)), case.buffer(random(size))
        before = case.buffer(random(tokens, size, dtype=dtype, seed=2)) if residual else 0
        y, total = case.zeros(tokens, size, dtype=dtype), case.zeros(tokens, size, dtype=dtype)
        q, scale = case.zeros(tokens, 128, dtype=torch.int8), case.zeros(tokens)
        sums = case.zeros(tokens, 1, dtype=torch.int32)
        case.call("rms_norm", THREADS, LEVEL, dtype is BF16, x, size, size, before, size, *2 * (dtype is BF16,), weight,
                  0, 1e-5,
                  0 if int8 else y, total if residual else 0, tokens, 1, size, q if int8 else 0, 128, scale, sums,
                  0, 0 if size % 64 else 64, 0)  # fmt: skip
        case.close(y, 1e-5, CLOSE[dtype])
        case.close(q, 1.0)
        case.close(scale, 1e-6, 2**-7)
        case.bits(total)
        yield case


def gates() -> Iterator[Case]:
    for dtype, gate, size in product((BF16, F32), ALL_KINDS.values(), (64, 99)):
        tokens, width = 19, size if gate in UNGATED.values() else 2 * size
        case = Case(f"gate {gate}, {name_of(dtype)} of {size}")
        x = case.buffer(random(tokens, width, dtype=dtype, scale=3.0))
        y, alone = (case.zeros(tokens, size, dtype=dtype) for _ in range(2))
        factors = 0.75, 0.8, 0.3  # scale of the gate, alphas of xielu
        case.call("gated", THREADS, LEVEL, dtype is BF16, gate, x, width, y, tokens, size, *factors, *[0] * 7)
        for token in range(tokens):
            case.call("gated", THREADS, LEVEL, dtype is BF16, gate, x.at(token * width), width,
                      alone.at(token * size), 1, size, *factors, *[0] * 7)  # fmt: skip
        case.same(y, alone)
        case.close(y, 1e-5, CLOSE[dtype])
        yield case


def pointwise() -> Iterator[Case]:
    for dtype, size in product((BF16, F32), (64, 99)):
        rows, half = 13, dtype is BF16
        case = Case(f"pointwise {name_of(dtype)} of {size}")
        x, other = (case.buffer(random(rows, size, dtype=dtype, seed=s)) for s in (0, 1))
        gate, ids = case.buffer(random(rows, dtype=dtype)), case.buffer(integers(0, rows, 7))
        out = [case.zeros(rows, size, dtype=dtype) for _ in range(5)]
        wide = case.zeros(rows, size)
        case.call("add_rows", THREADS, LEVEL, half, half, x, size, other, size, out[0], rows, size)
        case.call("scale_rows", THREADS, LEVEL, half, x, size, 0.25, 0.0, out[1], rows, size)
        case.call("scale_rows", THREADS, LEVEL, half, x, size, 2.5, 5.0, out[2], rows, size)
        case.call("add_gated_rows", THREADS, LEVEL, half, x, size, other, size, gate, 1, out[3], rows, size)
        case.call("gather", THREADS, LEVEL, half, x, size, ids, out[4], 7, size)
        case.call("widen_rows", THREADS, LEVEL, half, x, size, wide, rows, size)
        for exact in (out[0], out[1], out[4], wide):
            case.bits(exact)
        for rounded in (out[2], out[3]):
            case.close(rounded, 1e-5, CLOSE[dtype])
        yield case


def ropes() -> Iterator[Case]:
    for dtype, interleaved in product((BF16, F32), (False, True)):
        tokens, heads, dim = 11, 3, 64
        case = Case(f"rope {name_of(dtype)}, interleaved {interleaved}")
        x, y = (
            case.buffer(random(tokens, heads, dim, dtype=dtype)),
            case.zeros(tokens, heads, dim, dtype=dtype),
        )
        angles = random(tokens, dim // 2)
        cos, sin = case.buffer(angles.cos()), case.buffer(angles.sin())
        case.call("rope", THREADS, LEVEL, dtype is BF16, interleaved, x, heads * dim, dim, cos, sin, y, tokens, heads,
                  dim, dim // 2)  # fmt: skip
        case.close(y, 1e-6, CLOSE[dtype])
        yield case


HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 64, 32
# Where K and V lie, and their bits.
FORMS: tuple[tuple[str, torch.dtype, tuple[int, int]], ...] = (
    ("rows", BF16, (16, 16)),
    ("rows", F32, (16, 16)),
    ("tiles", BF16, (16, 16)),
    ("tiles", torch.int8, (8, 8)),
    ("tiles", torch.int8, (8, 4)),
    ("tiles", torch.int8, (4, 4)),
)
# (tokens of the step, length with them) of each sequence: a decode, a chunk, a whole prompt, a long decode.
SEQUENCES = [(1, 70), (20, 90), (33, 33), (1, 550)]


def caches() -> Iterator[Case]:
    options = [(False, 0, 0.0), (True, 50, 0.0), (False, 0, 20.0)]  # norm of q and k; window; cap
    for (form, dtype, bits), (norm, window, cap) in product(FORMS, options):
        yield cache(form, dtype, bits, norm, window, cap)


def piece_of(dtype: torch.dtype, bits: tuple[int, int]) -> int:
    """Return the elements of a head's piece of a block."""
    return BLOCK // TILE * KvCodes(*bits).tile_bytes(DIM, DIM) if dtype is torch.int8 else BLOCK * 2 * DIM


def cache(form: str, dtype: torch.dtype, bits: tuple[int, int], norm: bool, window: int, cap: float) -> Case:
    """Prompts through the fused rope and store; then attention, in one call and each sequence alone, in two chunks."""
    case = Case(f"attention over {form} of {name_of(dtype)} {bits}, norm {norm}, window {window}, cap {cap}")
    tiles, int8 = form == "tiles", dtype is torch.int8
    kind = F32 if dtype is F32 else BF16
    exponents = torch.arange(KV_HEADS * DIM) % 5 - 2
    factors = [case.buffer(torch.exp2(sign * exponents.float())) if int8 else 0 for sign in (1, -1)]
    flags = (kind is BF16, dtype is BF16, tiles, *bits)
    per_seq = [-(-length // BLOCK) for _, length in SEQUENCES]
    table = torch.zeros(len(SEQUENCES), max(per_seq), dtype=torch.int64)
    for seq, blocks in enumerate(per_seq):
        first = sum(per_seq[:seq])
        table[seq, :blocks] = torch.arange(first, first + blocks).flip(0)
    piece = piece_of(dtype, bits)
    pieces = case.zeros(sum(per_seq), KV_HEADS, piece, dtype=dtype)
    tokens, width = sum(length for _, length in SEQUENCES), (HEADS + 2 * KV_HEADS) * DIM
    block_ids = torch.cat([table[s, torch.arange(n) // BLOCK] for s, (_, n) in enumerate(SEQUENCES)])
    offsets = torch.cat([torch.arange(n) % BLOCK for _, n in SEQUENCES])
    qkv, angles = case.buffer(random(tokens, width, dtype=kind)), random(tokens, DIM // 2)
    cos, sin = case.buffer(angles.cos()), case.buffer(angles.sin())
    weights = [case.buffer(random(DIM).abs()) if norm else 0 for _ in range(2)]
    q_all = case.zeros(tokens, HEADS * DIM, dtype=kind)
    case.call("rope_store", THREADS, LEVEL, *flags, factors[0], False, qkv, width, cos, sin, DIM // 2, *weights,
              False, 1e-5, q_all, pieces, KV_HEADS * piece, piece, case.buffer(block_ids), case.buffer(offsets),
              tokens, HEADS, KV_HEADS, DIM, DIM, BLOCK)  # fmt: skip
    step = sum(count for count, _ in SEQUENCES)
    q = case.buffer(random(step, HEADS * DIM, dtype=kind, seed=5))
    y, alone = (case.zeros(step, HEADS * DIM, dtype=kind) for _ in range(2))
    sinks = case.buffer(random(HEADS)) if window else 0

    def attend(q: Place, y: Place, spans: list[tuple[int, int]], seq: int) -> None:
        starts = torch.tensor([0, *(count for count, _ in spans)]).cumsum(0)
        lengths, rows = (
            torch.tensor([length for _, length in spans]),
            table[seq : seq + len(spans)].contiguous(),
        )
        extents = torch.tensor([len(spans), table.shape[1]])
        case.call("attention", THREADS, LEVEL, *flags, factors[1], q, HEADS * DIM, pieces, KV_HEADS * piece, piece,
                  sinks, y, *map(case.buffer, (starts, lengths, rows, extents)), HEADS, KV_HEADS, DIM, DIM, BLOCK,
                  window, 0.125, cap, False, 0, 1, False)  # fmt: skip

    attend(q, y, SEQUENCES, 0)
    row = 0
    for seq, (count, length) in enumerate(SEQUENCES):
        first = count // 2
        for chunk, end in ((first, length - count + first), (count - first, length)):
            if chunk:
                attend(q.at(row * HEADS * DIM), alone.at(row * HEADS * DIM), [(chunk, end)], seq)
            row += chunk
    case.same(y, alone)
    case.close(q_all, 1e-5, 2 * CLOSE[kind])
    if int8:
        case.close(y, 0.05, 0.05)  # a key on the border of two codes may take either
    else:
        case.close(pieces, 1e-5, 2 * CLOSE[kind])
        case.close(y, 0.02 if kind is BF16 else 1e-5, CLOSE[kind])
    return case


def stores() -> Iterator[Case]:
    """Keys and values into every form of the cache; without rope all of it is exact."""
    for form, dtype, bits in FORMS:
        tokens, piece, tiles = 40, piece_of(dtype, bits), form == "tiles"
        kind = F32 if dtype is F32 else BF16
        case = Case(f"store into {form} of {name_of(dtype)} {bits}")
        k, v = (case.buffer(random(tokens, KV_HEADS, DIM, dtype=kind, seed=s)) for s in (0, 1))
        pieces = case.zeros(3, KV_HEADS, piece, dtype=dtype)
        places = (case.buffer(torch.arange(tokens) // BLOCK), case.buffer(torch.arange(tokens) % BLOCK))
        case.call("store_kv", THREADS, LEVEL, kind is BF16, dtype is BF16, tiles, *bits, 0, k,
                  KV_HEADS * DIM, DIM, v, KV_HEADS * DIM, DIM, pieces, KV_HEADS * piece, piece, *places, tokens,
                  KV_HEADS, DIM, DIM, BLOCK)  # fmt: skip
        case.bits(pieces)
        yield case


def sampling() -> Iterator[Case]:
    for vocab in (1000, 4099):
        rows = 12
        case = Case(f"sampling and logprobs of {vocab} ids")
        columns = np.zeros(rows, COLUMNS)
        for row, record in enumerate(columns):
            record["features"] = (
                (RANDOM if row else 0) | (TRUNCATED if row % 3 else 0) | (MIN_P if row % 4 == 3 else 0)
            )
            record["features"] |= LOGPROBS
            record["temperature"] = 0.5 + row / 8
            record["top_k"] = 40 if row % 3 == 1 else vocab
            record["top_p"] = 0.9 if row % 3 == 2 else 1.0
            record["min_p"] = 0.05 if row % 4 == 3 else 0.0
            record["seed"], record["position"], record["num_logprobs"] = 1234567 * row - 5, 17 + row, 4
        logits = case.buffer(random(rows, vocab, scale=4.0))
        table = case.pointers(*(logits.at(row * vocab) for row in range(rows)))
        records = case.buffer(torch.from_numpy(columns.view(np.uint8).copy()))
        ids, best = case.zeros(rows, dtype=torch.int64), case.zeros(rows)
        edited = ((2, case.buffer(random(vocab, scale=4.0, seed=7))),)
        case.call("sample", THREADS, LEVEL, logits, vocab, edited, records, rows, vocab, 1, ids, best)
        width = 5
        num_top = case.buffer(integers(0, width + 1, rows))
        logprobs, top = case.zeros(rows, dtype=torch.float64), case.zeros(rows, width, dtype=torch.float64)
        ranks, top_ids = case.zeros(rows, dtype=torch.int64), case.zeros(rows, width, dtype=torch.int64)
        case.call(
            "logprobs", THREADS, LEVEL, table, ids, num_top, rows, vocab, width, logprobs, ranks, top_ids, top
        )
        for each in (ids, best, logprobs, ranks, top_ids, top):
            case.bits(each)
        yield case


def adapters() -> Iterator[Case]:
    for dtype, (rows, k) in product((BF16, F32), [(7, 100), (30, 128)]):
        case = Case(f"adapters {name_of(dtype)}, {rows} rows of {k}")
        slots, max_rank, step, widths = 3, 32, 2 if dtype is BF16 else 1, (64, 40)
        ranks = torch.tensor([[0, 0], [16, 8], [32, 0]])
        padded, columns = -(-k // step) * step, sum(-(-w // 16) * 16 for w in widths)
        a = torch.zeros(slots, 2, max_rank * padded, dtype=dtype)
        b = torch.zeros(slots, columns * max_rank, dtype=dtype)
        for slot, part in product(range(slots), range(2)):
            rank, before = int(ranks[slot, part]), [0, 64][part]
            size = -(-rank // 16) * 16 * padded
            a[slot, part, :size] = random(size, dtype=dtype, seed=slot)
            size = -(-widths[part] // 16) * 16 * rank
            b[slot, before * max_rank : before * max_rank + size] = random(size, dtype=dtype, seed=slot + 9)
        if k % step:
            a.view(slots, 2, -1, padded // step, 16, step)[..., -1, :, 1:] = 0
        slot_of = integers(0, slots, rows)
        order = torch.cat([torch.nonzero(slot_of == s).flatten() for s in range(1, slots)])
        starts = torch.tensor([0, 0, *(int((slot_of == s).sum()) for s in range(1, slots))]).cumsum(0)
        x, y = (
            case.buffer(random(rows, k, dtype=dtype)),
            case.buffer(random(rows, sum(widths), dtype=dtype, seed=3)),
        )
        h = case.zeros(rows, 2 * max_rank, dtype=dtype)
        gained, gains, offsets = torch.tensor([[0, 0], [0, 1], [1, 0]]), *random(2, slots, sum(widths))
        scales = random(slots, 2).abs()
        inputs = map(case.buffer, (a, b, order, starts, ranks, scales, gained, gains, offsets))
        case.call("add_lora", THREADS, LEVEL, dtype is BF16, x, k, y, sum(widths), h, *inputs, rows, k, slots, 2,
                  max_rank, (*widths, 0))  # fmt: skip
        case.close(y, 2.0 if dtype is BF16 else 1e-3, CLOSE[dtype])
        yield case


def experts() -> Iterator[Case]:
    for bits, (tokens, top_k) in product((0, 8), [(1, 2), (23, 3)]):
        case = Case(f"experts of {bits or 16} bits, {tokens} tokens, {top_k} of 6")
        hidden, inter, num = 128, 64, 6
        logits, x = case.buffer(random(tokens, num)), case.buffer(random(tokens, hidden, dtype=BF16))
        chosen, ids = case.zeros(tokens, top_k), case.zeros(tokens, top_k, dtype=torch.int64)
        case.call("route", THREADS, logits, 0, 0, tokens, num, top_k, 1, 1, False, True, 1.0, chosen, ids, 0)
        tables = []
        for n, k in ((2 * inter, hidden), (hidden, inter)):
            targets: list[Place | None] = []
            for expert in range(num):
                if bits:
                    packed, columns, _ = quantized_weight(case, bits, 0, False, n, k)
                    targets += [packed, None, columns, None]
                    continue
                w = case.buffer(random(n, k, dtype=BF16, seed=expert, scale=k**-0.5))
                packed = case.zeros(_native.packed_elements("bfloat16", n, k), dtype=BF16)
                case.call("pack", THREADS, "bfloat16", w, n, k, 0, packed)
                targets += [packed, None, None, None]
            tables.append(case.pointers(*targets))
        up, down = ((bits, 0, False, 64, hidden), (bits, 0, False, 32, inter))
        size = _native.experts_scratch_bytes("bfloat16", tokens, hidden, inter, num, top_k, up, down, None)
        scratch, y = case.zeros(size, dtype=torch.uint8), case.zeros(tokens, hidden, dtype=BF16)
        case.call("experts", THREADS, LEVEL, "bfloat16", x, hidden, chosen, ids, *tables, 0, y, scratch, tokens,
                  hidden, inter, num, top_k, up, down, None)  # fmt: skip
        case.bits(ids)
        case.execute()
        spread = float(y.tensor.float().abs().max())
        case.close(y, spread / 64, CLOSE[BF16])
        yield case


MAKERS: tuple[Callable[[], Iterator[Case]], ...] = (
    linears, quantized, weights, norms, gates, pointwise, ropes, caches, stores, sampling, adapters, experts,
)  # fmt: skip


def all_cases() -> list[Case]:
    return [case for make in MAKERS for case in make()]
