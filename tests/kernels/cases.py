"""One table of cases for every op: the tests check them against oracles, the benchmark times them.

Sizes include 1, primes, a tile ± 1 and empty batches, beside shapes of real models (marked ``bench``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from quire.families.gguf_types import BLOCK_TYPES
from quire.kernels.attention.batch import AttentionShape, RaggedBatch
from quire.kernels.kv_blocks import SCALE_BYTES, TILE, KvView, Layout, can_tile, view_layer
from quire.kernels.kv_codes import KvCodes
from quire.kernels.pointwise import ActivationKind
from quire.kernels.workspace import huge_zeros
from quire.modelspec import MoeSpec
from quire.weight_format import ROTATIONS, RowFormat, WeightFormat


@dataclass(frozen=True, slots=True)
class LinearCase:
    num_tokens: int
    in_features: int
    out_features: int
    bias: bool = False
    bench: bool = False


@dataclass(frozen=True, slots=True)
class RowCase:
    """Ops over rows: norm, activation, embedding."""

    num_tokens: int
    size: int
    bench: bool = False


@dataclass(frozen=True, slots=True)
class RopeCase:
    num_tokens: int
    num_heads: int
    head_dim: int
    half: int
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """``lengths``: (queries, KV length after the step) of each sequence."""

    name: str
    lengths: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    v_head_dim: int = 16
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    v_in_k: bool = False
    layout: Layout = "rows"
    int8: bool = False  # in rows, as a GPU has it
    fp8: bool = False  # the same
    bits: tuple[int, int] = (16, 16)  # of K and V in tiles
    bench: bool = False

    def in_tiles(self, bits: tuple[int, int] = (16, 16)) -> AttentionCase | None:
        """The same case over a cache in tiles of bf16 or of codes, if it can be."""
        if not can_tile(torch.bfloat16, self.block_size, self.head_dim, v_in_k=self.v_in_k):
            return None
        kinds = " and ".join({16: "bf16", 8: "int8", 4: "int4"}[size] for size in bits)
        return replace(self, name=f"{self.name}, tiles of {kinds}", layout="tiles", bits=bits)


@dataclass(frozen=True, slots=True)
class MoeCase:
    name: str
    num_tokens: int
    hidden_size: int
    spec: MoeSpec
    bench: bool = False


@dataclass(frozen=True, slots=True)
class LoraCase:
    """``slots``: the slot of each row. ``ranks``: of each slot, a rank for each part, 0 where it has none."""

    in_features: int
    widths: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    slots: tuple[int, ...]
    bench: bool = False
    dora: bool = False  # every second part scales y


LORA: tuple[LoraCase, ...] = (
    LoraCase(8, (8,), ((2,),), ()),
    LoraCase(1, (1,), ((1,),), (1,)),
    LoraCase(16, (8,), ((4,), (4,)), (0, 0, 0)),
    LoraCase(33, (7, 5, 70), ((3, 0, 17), (16, 5, 1)), (2, 0, 1, 2, 2, 0, 1)),
    LoraCase(64, (48, 16, 16), ((8, 8, 8), (0, 0, 33), (1, 2, 3)), (3, 3, 1, 0, 2, 3, 1, 3, 3, 3, 1)),
    LoraCase(131, (130,), ((16,), (64,), (7,)), (1,) * 70 + (2, 0, 3) * 5),
    LoraCase(576, (1536, 1536), ((16, 16), (16, 16)), (1, 2) * 9),
    LoraCase(33, (7, 5, 70), ((3, 0, 17), (16, 5, 1)), (2, 0, 1, 2, 2, 0, 1), dora=True),
    LoraCase(131, (130,), ((16,), (64,), (7,)), (1,) * 70 + (2, 0, 3) * 5, dora=True),
    LoraCase(2048, (2048, 512, 512), ((16, 16, 16),) * 8, tuple(range(1, 9)) * 4, bench=True),
    LoraCase(2048, (8192, 8192), ((16, 16),) * 8, tuple(range(1, 9)) * 4, bench=True),
    LoraCase(8192, (2048,), ((16,),) * 8, tuple(range(1, 9)) * 4, bench=True),
)

LINEAR: tuple[LinearCase, ...] = (
    LinearCase(0, 16, 8),
    LinearCase(1, 1, 1),
    LinearCase(1, 64, 172, bias=True),
    LinearCase(2, 13, 5),  # MKL's edge kernels break exactness at such sizes unless padded
    LinearCase(7, 31, 33, bias=True),
    LinearCase(31, 48, 96),
    LinearCase(32, 172, 64),
    LinearCase(33, 257, 8),
    LinearCase(65, 576, 192, bias=True),
    LinearCase(1, 2048, 8192, bench=True),
    LinearCase(16, 2048, 8192, bench=True),
    LinearCase(32, 2048, 8192, bench=True),
    LinearCase(512, 2048, 8192, bench=True),
)

# in_features that are whole groups, end in a short one, and are no multiple of a quad; out_features off the panels.
QUANTIZED: tuple[LinearCase, ...] = (
    LinearCase(0, 64, 8),
    LinearCase(1, 1, 1),
    LinearCase(3, 64, 172, bias=True),
    LinearCase(2, 13, 5),
    LinearCase(7, 131, 33, bias=True),
    LinearCase(13, 256, 96),
    LinearCase(40, 1100, 70, bias=True),
    LinearCase(65, 576, 192, bias=True),
    LinearCase(1, 2048, 8192, bench=True),
    LinearCase(8, 2048, 8192, bench=True),
    LinearCase(16, 2048, 8192, bench=True),
    LinearCase(32, 2048, 8192, bench=True),
    LinearCase(512, 2048, 8192, bench=True),
)

FORMATS: tuple[WeightFormat, ...] = (
    *(WeightFormat("int8", group, offset) for group in (None, 16, 32, 64, 128) for offset in (False, True)),
    *(WeightFormat("int4", group, offset) for group in (32, 64, 128) for offset in (False, True)),
    WeightFormat("int4", 16),
    *(form.held for form in BLOCK_TYPES.values() if form.held.wide != form.held),
)


def row_formats(size: int) -> list[RowFormat]:
    """Formats of rows of ``size`` inputs: without and with groups, and with every rotation that divides them."""
    rotations = [None, *(rotation for rotation in ROTATIONS if size % rotation == 0)]
    scales = ((None, None), (16, None), (16, 32), (32, 32), (128, 64))
    return [RowFormat(group, rotation, block) for group, block in scales for rotation in rotations]


ROWS: tuple[RowCase, ...] = (
    RowCase(0, 16),
    RowCase(1, 1),
    RowCase(1, 7),
    RowCase(3, 64),
    RowCase(17, 31),
    RowCase(31, 33),
    RowCase(33, 172),
    RowCase(64, 577),
    RowCase(5, 192),
    RowCase(1, 2048, bench=True),
    RowCase(512, 2048, bench=True),
)

ACTIVATIONS: tuple[ActivationKind, ...] = ("silu", "gelu_tanh", "gelu", "swiglu_oai")

ROPE: tuple[RopeCase, ...] = (
    RopeCase(0, 2, 8, 4),
    RopeCase(1, 1, 2, 1),
    RopeCase(5, 3, 8, 4),
    RopeCase(17, 6, 64, 32),
    RopeCase(33, 2, 80, 10),  # partial: 20 of 80 are rotated
    RopeCase(13, 5, 16, 8, interleaved=True),
    RopeCase(7, 4, 24, 5, interleaved=True),
)

ATTENTION: tuple[AttentionCase, ...] = (
    AttentionCase("empty", ()),
    AttentionCase("one token", ((1, 1),)),
    AttentionCase("decode", ((1, 5), (1, 64), (1, 65), (1, 131), (1, 16))),
    AttentionCase("chunks", ((7, 7), (64, 64), (65, 65), (33, 97), (1, 129), (17, 63))),
    AttentionCase("mha", ((5, 70), (1, 9)), num_heads=3, num_kv_heads=3, head_dim=8, v_head_dim=8),
    AttentionCase("mqa, group of 9", ((5, 70), (1, 130)), num_heads=9, num_kv_heads=1),
    AttentionCase("group of 3", ((11, 75), (1, 1)), num_heads=6, head_dim=80, v_head_dim=80),
    AttentionCase("v narrower", ((9, 90), (1, 66)), head_dim=24, v_head_dim=6),
    AttentionCase("window", ((70, 150), (1, 200), (1, 31), (3, 3)), window=32),
    AttentionCase("window of 1", ((5, 70), (1, 65)), window=1),
    AttentionCase("odd window", ((40, 101), (1, 67)), window=13),
    AttentionCase("soft cap", ((20, 80), (1, 33)), soft_cap=5.0),
    AttentionCase("sinks", ((20, 80), (1, 1), (1, 100)), sinks=True),
    AttentionCase("sinks, window", ((20, 80), (1, 100)), sinks=True, window=17),
    AttentionCase("block of 1", ((3, 70), (1, 5)), block_size=1),
    AttentionCase("block of 5", ((9, 70), (1, 5), (1, 131)), block_size=5),
    AttentionCase("block of 128", ((9, 200), (1, 129)), block_size=128),
    AttentionCase(
        "latent", ((9, 80), (1, 70)), 5, 1, head_dim=40, v_head_dim=32, v_in_k=True
    ),
    AttentionCase("latent, odd", ((9, 80), (1, 70)), 20, 1, head_dim=26, v_head_dim=22, v_in_k=True),
    AttentionCase("splits", ((1, 1500), (3, 515), (1, 512), (1, 513)), 6, 2, 64, 64),
    AttentionCase("splits of a chunk", ((300, 1100),), 4, 1, 32, 32, window=600, sinks=True),
    AttentionCase("head of 80", ((30, 300), (1, 40)), 8, 2, 80, 80),
    AttentionCase("head of 96", ((19, 150), (1, 65)), 3, 3, 96, 96),
    AttentionCase("head of 128, block of 32", ((33, 150), (1, 65)), 8, 2, 128, 128, block_size=32),
    AttentionCase("head of 256", ((10, 70), (1, 100)), 4, 1, 256, 256),
    AttentionCase("1B decode, 32 x 512", ((1, 512),) * 32, 32, 8, 64, 64, bench=True),
    AttentionCase("1B decode, 8 x 8192", ((1, 8192),) * 8, 32, 8, 64, 64, bench=True),
    AttentionCase("135M decode, 32 x 192", ((1, 192),) * 32, 9, 3, 64, 64, bench=True),
    AttentionCase("135M chunk of 512", ((512, 512),), 9, 3, 64, 64, bench=True),
    AttentionCase("1B chunk of 512", ((512, 512),), 32, 8, 64, 64, bench=True),
)  # fmt: skip

MOE: tuple[MoeCase, ...] = (
    MoeCase("mixtral", 33, 32, MoeSpec(8, 2, 48)),
    MoeCase("no tokens", 0, 32, MoeSpec(8, 2, 48)),
    MoeCase("qwen2-moe", 17, 24, MoeSpec(6, 3, 20, normalize_topk=False)),
    MoeCase("gpt-oss", 19, 32, MoeSpec(5, 2, 16, scoring="softmax_after_topk")),
    MoeCase(
        "deepseek-v2",
        40,
        32,
        MoeSpec(8, 3, 16, normalize_topk=False, routed_scale=16.0, num_groups=4, topk_groups=2),
    ),
    MoeCase(
        "deepseek-v3",
        40,
        32,
        MoeSpec(
            16, 4, 16, scoring="sigmoid", routed_scale=2.5, correction_bias=True, num_groups=4, topk_groups=2,
            group_score="top2_sum",
        ),
    ),
    MoeCase("one expert", 3, 7, MoeSpec(1, 1, 5)),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Tensors of an `AttentionCase`. Blocks lie in random order; what no sequence owns holds finite rubbish."""

    q: torch.Tensor
    kv: KvView
    batch: RaggedBatch
    shape: AttentionShape
    sinks: torch.Tensor | None


def attention_inputs(case: AttentionCase, dtype: torch.dtype, generator: torch.Generator) -> AttentionInputs:
    """Make the tensors of ``case``: ``q`` and the cache in ``dtype``."""
    num_blocks = [-(-length // case.block_size) for _, length in case.lengths]
    total = sum(num_blocks) + 3
    piece = case.block_size * (case.head_dim + (0 if case.v_in_k else case.v_head_dim))
    storage = huge_zeros(total, 2 * case.num_kv_heads * piece, dtype=dtype)  # as a cache has them
    storage.copy_(torch.randn(storage.shape, generator=generator))
    codes = None
    if case.int8 or case.fp8:
        piece += case.block_size * SCALE_BYTES
        kind = torch.int8 if case.int8 else torch.float8_e4m3fn
        storage = huge_zeros(total, 2 * case.num_kv_heads * piece, dtype=kind)
    elif case.bits != (16, 16):
        exponents = torch.randint(-3, 4, (case.num_kv_heads, case.head_dim), generator=generator)
        codes = KvCodes(*case.bits, torch.exp2(torch.stack((exponents, -exponents)).float()))
        piece = case.block_size // TILE * codes.tile_bytes(case.head_dim, case.v_head_dim)
        storage = huge_zeros(total, 2 * case.num_kv_heads * piece, dtype=torch.int8)
    kv = view_layer(
        storage,
        1,
        num_kv_heads=case.num_kv_heads,
        block_size=case.block_size,
        head_dim=case.head_dim,
        v_head_dim=case.v_head_dim,
        v_in_k=case.v_in_k,
        layout=case.layout,
        codes=codes,
    )
    if codes is not None or case.int8 or case.fp8:
        slots = torch.arange(total * case.block_size)
        k, v = (
            torch.randn(len(slots), case.num_kv_heads, dim, generator=generator)
            for dim in (case.head_dim, case.v_head_dim)
        )
        if codes is not None and codes.factors is not None:
            k /= codes.factors[0]  # what factors are for: queries have the inverse, below
        kv.write(k, v, slots // case.block_size, slots % case.block_size)
    order = torch.randperm(total, generator=generator)
    table = torch.zeros(len(case.lengths), max(num_blocks, default=1), dtype=torch.int64)
    taken = 0
    for row, count in enumerate(num_blocks):
        table[row, :count] = order[taken : taken + count]
        taken += count
    cu_seqlens_q = torch.tensor([0, *(n for n, _ in case.lengths)]).cumsum(0)
    q = torch.randn(int(cu_seqlens_q[-1]), case.num_heads, case.head_dim, generator=generator).to(dtype)
    if codes is not None and codes.factors is not None:
        q /= codes.factors[1].repeat_interleave(case.num_heads // case.num_kv_heads, dim=0)
    return AttentionInputs(
        q,
        kv,
        RaggedBatch(
            cu_seqlens_q.numpy(),
            torch.tensor([n for _, n in case.lengths], dtype=torch.int64).numpy(),
            table.numpy(),
        ),
        AttentionShape(case.num_heads, case.head_dim**-0.5, case.window, case.soft_cap),
        torch.randn(case.num_heads, generator=generator) if case.sinks else None,
    )
