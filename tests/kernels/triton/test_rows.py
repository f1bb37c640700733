"""Norms, activations, and what lies between the projection and attention, against the torch reference."""

from __future__ import annotations

import pytest
import torch
from tests.kernels import cases
from tests.kernels.checks import DTYPES, assert_close, assert_same_bits, generator
from tests.kernels.test_activation import oracle as gated_oracle
from tests.kernels.test_norm import EPS
from tests.kernels.test_norm import oracle as norm_oracle
from tests.kernels.test_rope import qk_norm
from tests.kernels.triton.device import DEVICE, WARNINGS

from quire.kernels.kv_blocks import KvView, clear_blocks, copy_blocks, view_layer
from quire.kernels.norm import add_rms_norm, add_rms_norm_to_fp8, rms_norm
from quire.kernels.pointwise import ActivationKind, gated
from quire.kernels.registry import Backend
from quire.kernels.rope import QkNorm, rope_store, store_kv

pytestmark = WARNINGS
SMALL = [case for case in cases.ROWS if not case.bench]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_norm(case: cases.RowCase, dtype: torch.dtype) -> None:
    rng = generator()
    weight = torch.randn(case.size, generator=rng)
    x, residual = (torch.randn(case.num_tokens, case.size, generator=rng).to(dtype) for _ in range(2))
    there = x.to(DEVICE), residual.to(DEVICE), weight.to(DEVICE)
    assert_close("rms_norm", rms_norm.on("triton")(there[0], there[2], EPS).cpu(), norm_oracle(x, weight))
    normed, total = add_rms_norm.on("triton")(*there, EPS)
    assert_same_bits(total.cpu(), residual + x, "residual")
    assert_close("rms_norm", normed.cpu(), norm_oracle(residual + x, weight))
    for row in range(min(case.num_tokens, 2)):
        alone = add_rms_norm.on("triton")(there[0][row : row + 1], there[1][row : row + 1], there[2], EPS)
        assert_same_bits(alone[0], normed[row : row + 1], "a row alone")


def test_norm_as_fp8_rows() -> None:
    """As the reference, by at most one step of fp8 where the norm rounds otherwise; a row of zeros has the scale 0."""
    rng = generator()
    x, residual, weight = (torch.randn(*shape, generator=rng) for shape in ((5, 172), (5, 172), (172,)))
    x[2] = residual[2] = 0.0
    residual = residual.bfloat16()
    for other in (x.bfloat16(), None):
        there = None if other is None else other.to(DEVICE)
        made, total = add_rms_norm_to_fp8.on("triton")(there, residual.to(DEVICE), weight.to(DEVICE), EPS)
        plain, expected = add_rms_norm_to_fp8.on("reference")(other, residual, weight, EPS)
        assert_close("rms_norm", made.scale.cpu().bfloat16(), plain.scale.double())
        assert_same_bits(total.cpu(), expected, "sum")
        step = plain.q.float().abs().amax(-1, keepdim=True) / 14
        assert ((made.q.cpu().float() - plain.q.float()).abs() <= step).all()


def test_norm_of_heads_with_strides_and_weights_of_their_own() -> None:
    rng = generator()
    fused = torch.randn(9, 96, generator=rng).to(DEVICE)
    heads = fused[:, 16:64].unflatten(-1, (3, 16))
    for weight in (torch.randn(16, generator=rng), torch.randn(3, 16, generator=rng)):
        y = rms_norm.on("triton")(heads, weight.to(DEVICE), EPS)
        assert_close("rms_norm", y.cpu(), norm_oracle(heads.cpu(), weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", cases.ACTIVATIONS)
@pytest.mark.parametrize(("tokens", "size"), [(0, 16), (1, 7), (5, 172), (3, 1500)])
def test_gated(tokens: int, size: int, kind: ActivationKind, dtype: torch.dtype) -> None:
    x = (torch.randn(tokens, 2 * size + 3, generator=generator()) * 4).to(dtype)[:, : 2 * size]
    assert_close("gated", gated.on("triton")(x.to(DEVICE), kind).cpu(), gated_oracle(x, kind))


def stored(
    qkv: torch.Tensor, norm: QkNorm | None, dtype: torch.dtype, backend: Backend, *, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """4 heads over 2 kv heads of 12 and 10 elements, 10 of 12 rotated; what a later step reads."""
    device = torch.device("cpu") if backend == "reference" else DEVICE
    extra = 8 if dtype.itemsize == 1 else 0
    storage = torch.zeros(3, 2 * 16 * (22 + extra), dtype=dtype).to(device)
    kv = view_layer(storage, 0, num_kv_heads=2, block_size=16, head_dim=12, v_head_dim=10)
    ids = torch.randperm(48, generator=generator(5))[: len(qkv)].to(device)
    angles = torch.rand(len(qkv), 5, generator=generator(3)) * 100
    cos_sin = angles.cos().to(device), angles.sin().to(device)
    if norm is not None:
        norm = QkNorm(norm.q_weight.to(device), norm.k_weight.to(device), norm.eps, norm.over_all)
    q = rope_store.on(backend)(
        qkv.to(device), 4, cos_sin, norm, kv, ids // 16, ids % 16, interleaved=interleaved
    )
    k, v = KvView(storage.cpu().view(3, 2, -1), 16, 12, 10).read(torch.arange(3))
    return q.cpu(), k, v


@pytest.mark.parametrize(
    ("kind", "interleaved", "dtype"),
    [
        pytest.param(
            kind,
            interleaved,
            dtype,
            marks=()
            if (kind, interleaved) == ("head", dtype in (torch.float32, torch.int8))
            else pytest.mark.slow,
        )
        for kind in ("none", "head", "full")
        for interleaved in (False, True)
        for dtype in (*DTYPES, torch.int8, torch.float8_e4m3fn)
    ],
)
def test_rope_store(kind: str, interleaved: bool, dtype: torch.dtype) -> None:
    """As the reference op by op, into caches of every type: 8 bits by at most one step where a sum rounds otherwise."""
    qkv = torch.randn(19, 4 * 12 + 2 * 22, generator=generator())
    qkv[3, 48:60] = 0.0  # a key of zeros has no scale to divide by
    qkv = qkv.to(torch.float32 if dtype == torch.float32 else torch.bfloat16)
    made = stored(qkv, qk_norm(kind), dtype, "triton", interleaved=interleaved)
    plain = stored(qkv, qk_norm(kind), dtype, "reference", interleaved=interleaved)
    assert_close("rope", made[0], plain[0].double())
    for one, other in zip(made[1:], plain[1:], strict=True):
        if dtype.itemsize > 1:
            assert_close("rope", one, other.double())
        else:
            step = other.abs().amax(-1, keepdim=True) / (127 if dtype == torch.int8 else 14)
            assert ((one - other).abs() <= step + 1e-6).all()
            assert (one != other).float().mean() < 0.02


def test_store_of_latents() -> None:
    """MLA: one head, no V."""
    storage = torch.zeros(3, 16 * 26).to(DEVICE)
    kv = view_layer(storage, 0, num_kv_heads=1, block_size=16, head_dim=26, v_head_dim=22, v_in_k=True)
    k, slots = (
        torch.randn(5, 1, 26, generator=generator()).to(DEVICE),
        torch.tensor([7, 0, 33, 3, 4]).to(DEVICE),
    )
    store_kv.on("triton")(k, None, kv, slots // 16, slots % 16)
    assert_same_bits(kv.keys[slots // 16, :, slots % 16], k, "latents")


def test_blocks_are_copied_and_cleared() -> None:
    storage = torch.randn(9, 33, generator=generator()).to(DEVICE)
    expected = storage.clone()
    moves = [(0, 1), (1, 2), (5, 6), (2, 6), (6, 0)]
    for source, target in moves:
        expected[target] = expected[source].clone()
    copy_blocks(storage, moves)
    assert_same_bits(storage, expected, "moves in order")
    clear_blocks(storage, torch.tensor([3, 0]))
    assert storage[[0, 3]].abs().sum() == 0
