"""RoPE against complex fp64 rotation; the KV store against plain indexing."""

from __future__ import annotations

import pytest
import torch
from tests.kernels import cases
from tests.kernels.checks import (
    DTYPES,
    assert_close,
    assert_rows_independent,
    assert_same_bits,
    each,
    generator,
    threads,
)

from quire.kernels import registry
from quire.kernels.kv_blocks import Layout, view_layer
from quire.kernels.kv_codes import KvCodes
from quire.kernels.registry import Backend
from quire.kernels.rope import QkNorm, apply_rope, rope_store, store_kv
from quire.kernels.rotation import rotate_heads

BACKENDS = registry.backends("apply_rope")


def oracle(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    y = x.double().clone()
    half = cos.shape[-1]
    turn = torch.complex(cos.double(), sin.double()).unsqueeze(1)
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    turned = torch.complex(y[..., first], y[..., second]) * turn
    y[..., first], y[..., second] = turned.real, turned.imag
    return y


def make(case: cases.RopeCase, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = generator()
    x = torch.randn(case.num_tokens, case.num_heads, case.head_dim, generator=rng).to(dtype)
    angles = torch.rand(case.num_tokens, case.half, generator=rng) * 100
    return x, angles.cos(), angles.sin()


@each("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", cases.ROPE, ids=str)
def test_against_complex_rotation(case: cases.RopeCase, dtype: torch.dtype, backend: Backend) -> None:
    x, cos, sin = make(case, dtype)
    y = apply_rope.on(backend)(x, cos, sin, interleaved=case.interleaved)
    assert_close("rope", y, oracle(x, cos, sin, case.interleaved))
    assert_same_bits(y[..., 2 * case.half :], x[..., 2 * case.half :], "what is not rotated")


@each("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [case for case in cases.ROPE if case.num_tokens], ids=str)
def test_a_row_does_not_depend_on_the_batch(
    case: cases.RopeCase, dtype: torch.dtype, backend: Backend
) -> None:
    x, cos, sin = make(case, dtype)
    assert_rows_independent(
        lambda ids: apply_rope.on(backend)(x[ids], cos[ids], sin[ids], interleaved=case.interleaved),
        case.num_tokens,
        str(case),
    )


@each("backend", BACKENDS)
@pytest.mark.parametrize("v_in_k", [False, True])
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_store_kv(block_size: int, v_in_k: bool, backend: Backend) -> None:
    rng = generator()
    heads, k_dim, v_dim, num_blocks = 3, 8, 6, 7
    piece = block_size * (k_dim + (0 if v_in_k else v_dim))
    storage = torch.zeros(num_blocks, 2 * heads * piece)
    kv = view_layer(
        storage, 1, num_kv_heads=heads, block_size=block_size, head_dim=k_dim, v_head_dim=v_dim, v_in_k=v_in_k
    )
    slots = torch.randperm(num_blocks * block_size, generator=rng)[:5]
    k = torch.randn(5, heads, k_dim, generator=rng)
    v = None if v_in_k else torch.randn(5, heads, v_dim, generator=rng)
    store_kv.on(backend)(k, v, kv, slots // block_size, slots % block_size)
    assert storage[:, : heads * piece].abs().sum() == 0, "the other layer's slot was written"
    for i, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, block_size)
        for head in range(heads):
            base = kv.pieces[block, head]
            assert_same_bits(base[offset * k_dim : (offset + 1) * k_dim], k[i, head], "K")
            if v is None:
                assert_same_bits(kv.values[block, head, offset], k[i, head, :v_dim], "V in K")
            else:
                start = block_size * k_dim + offset * v_dim
                assert_same_bits(base[start : start + v_dim], v[i, head], "V")
    assert int((kv.pieces != 0).sum()) == 5 * heads * (k_dim + (0 if v_in_k else v_dim))


@each("backend", BACKENDS)
@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize("count", [1, 2])
def test_store_into_tiles(count: int, block_size: int, backend: Backend) -> None:
    """Positions of tiles, stored in order in several calls; the first of a tile clears what lay there."""
    heads, k_dim, v_dim, length = 3, 10, 6, 70
    num_blocks = -(-length // block_size)
    storage = torch.full((num_blocks + 1, heads * block_size * (k_dim + v_dim)), float("nan")).bfloat16()
    kv = view_layer(
        storage,
        0,
        num_kv_heads=heads,
        block_size=block_size,
        head_dim=k_dim,
        v_head_dim=v_dim,
        layout="tiles",
    )
    k = torch.randn(length, heads, k_dim, generator=generator()).bfloat16()
    v = torch.randn(length, heads, v_dim, generator=generator()).bfloat16()
    table = torch.randperm(num_blocks + 1, generator=generator())[:num_blocks]
    position = torch.arange(length)
    with threads(count):
        for start, end in ((0, 1), (1, 37), (37, 64), (64, length)):
            part = position[start:end]
            at = table[part // block_size], part % block_size
            store_kv.on(backend)(k[start:end], v[start:end], kv, *at)
    keys, values = (part.transpose(0, 1).flatten(1, 2) for part in kv.read(table))
    end = -(-length // 16) * 16
    for stored, rows in ((keys, k), (values, v)):
        assert_same_bits(stored[:, :length].transpose(0, 1), rows, "stored")
        assert_same_bits(
            stored[:, length:end], torch.zeros_like(stored[:, length:end]), "the rest of the tile"
        )


@each("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_store_kv_into_another_dtype(dtype: torch.dtype, kv_dtype: torch.dtype, backend: Backend) -> None:
    """Slices of a fused projection, rounded as the cache holds them."""
    fused = torch.randn(5, 4, 8, generator=generator()).to(dtype)
    kv = view_layer(
        torch.zeros(3, 2 * 2 * 4 * 8, dtype=kv_dtype),
        0,
        num_kv_heads=2,
        block_size=4,
        head_dim=8,
        v_head_dim=8,
    )
    slots = torch.tensor([7, 0, 11, 3, 4])
    store_kv.on(backend)(fused[:, :2], fused[:, 2:], kv, slots // 4, slots % 4)
    assert_same_bits(kv.keys[slots // 4, :, slots % 4], fused[:, :2].to(kv_dtype), "K")
    assert_same_bits(kv.values[slots // 4, :, slots % 4], fused[:, 2:].to(kv_dtype), "V")


def fused(
    qkv: torch.Tensor,
    ids: torch.Tensor,
    norm: QkNorm | None,
    backend: Backend,
    *,
    interleaved: bool,
    layout: Layout,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """4 heads over 2 kv heads, 12 and 10 elements: rows ``ids``, each stored at the place of its id."""
    size = 5 if layout == "rows" else 16
    storage = torch.zeros(-(-len(qkv) // size), 2 * size * 22, dtype=qkv.dtype)
    kv = view_layer(storage, 0, num_kv_heads=2, block_size=size, head_dim=12, v_head_dim=10, layout=layout)
    angles = torch.rand(len(qkv), 5, generator=generator(3)) * 100
    cos_sin = angles.cos()[ids], angles.sin()[ids]
    q = rope_store.on(backend)(
        qkv[ids], 4, cos_sin, norm, kv, ids // size, ids % size, interleaved=interleaved
    )
    keys, values = (part.transpose(1, 2).flatten(0, 1)[ids] for part in kv.read(torch.arange(len(storage))))
    return q, keys, values


def qk_norm(kind: str) -> QkNorm | None:
    if kind == "none":
        return None
    heads = (4, 2) if kind == "full" else (1, 1)
    weights = (torch.rand(12 * count, generator=generator(4)) + 0.5 for count in heads)
    return QkNorm(*weights, 1e-5, over_all=kind == "full")


@each("backend", registry.backends("rope_store"))
@pytest.mark.parametrize(
    ("dtype", "layout"), [(torch.float32, "rows"), (torch.bfloat16, "rows"), (torch.bfloat16, "tiles")]
)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", ["none", "head", "full"])
def test_rope_store(
    kind: str, interleaved: bool, dtype: torch.dtype, layout: Layout, backend: Backend
) -> None:
    """In one pass as op by op; and a token's bits, in any batch, are those that it has alone."""
    qkv = torch.randn(37, 4 * 12 + 2 * 22, generator=generator()).to(dtype)
    ids, norm = torch.arange(37), qk_norm(kind)
    made = fused(qkv, ids, norm, backend, interleaved=interleaved, layout=layout)
    plain = fused(qkv.float(), ids, norm, "reference", interleaved=interleaved, layout="rows")
    for one, other in zip(made, plain, strict=True):
        assert_close("rope", one, other.double())
    assert_same_bits(made[2], qkv[:, 72:].unflatten(1, (2, 10)), "V")
    for count in (1, 2):
        with threads(count):
            for start in (0, 16, 36):
                part = torch.arange(start, 37)
                again = fused(qkv, part, norm, backend, interleaved=interleaved, layout=layout)
                for one, other in zip(again, made, strict=True):
                    assert_same_bits(one, other[part], f"{kind}, from {start}, {count} threads")


@each("backend", registry.backends("rope_store"))
@pytest.mark.parametrize("bits", [(8, 8), (8, 4), (4, 8), (4, 4)])
@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(12, 10), (64, 64), (96, 80), (256, 128)])
def test_tiles_of_codes_are_the_references(
    head_dim: int, v_head_dim: int, bits: tuple[int, int], backend: Backend
) -> None:
    """Both ways into the cache write the reference's bytes, a row of zeros among others; errors are half a step."""
    k, v = (torch.randn(37, 2, dim, generator=generator(dim)).bfloat16() for dim in (head_dim, v_head_dim))
    k[5, 1] = 0
    k[7, 0, 3] = 300.0
    exponents = torch.randint(-4, 5, (2, head_dim), generator=generator(3)).float()
    codes = KvCodes(*bits, torch.exp2(torch.stack((exponents, -exponents))))
    size = 2 * 2 * codes.tile_bytes(head_dim, v_head_dim)
    slots = torch.arange(37)
    at = slots // 32, slots % 32
    views = [
        view_layer(
            torch.full((2, size), 77, dtype=torch.int8), 0, num_kv_heads=2, block_size=32, head_dim=head_dim,
            v_head_dim=v_head_dim, layout="tiles", codes=codes,
        )
        for _ in range(3)
    ]  # fmt: skip
    store_kv(k, v, views[0], *at)
    store_kv.on(backend)(k, v, views[1], *at)
    qkv = torch.cat((torch.zeros(37, 4 * head_dim).bfloat16(), k.flatten(1), v.flatten(1)), dim=1)
    rope_store.on(backend)(qkv, 4, None, None, views[2], *at, False)
    for view in views[1:]:
        assert torch.equal(view.pieces, views[0].pieces)
    # Rotated numbers are off by half a step, and the mean square is the same behind the rotation.
    factors = codes.factors
    assert factors is not None
    for stored, rows, weigh, size in zip(
        views[0].read(torch.arange(2)), (k.float(), v.float()), (factors[0], 1.0), bits, strict=True
    ):
        error = (stored.transpose(1, 2).flatten(0, 1)[:37] - rows) * weigh
        steps = rotate_heads(rows * weigh).abs().amax(-1) / 127 * (1 if size == 8 else 17)
        assert (rotate_heads(error).abs() <= steps.unsqueeze(-1) / 2 * 1.001).all()
