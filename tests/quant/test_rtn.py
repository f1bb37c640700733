"""Rounding on load: error against the oracle of ggml, special rows, native as the reference, any ranges and threads."""

from __future__ import annotations

import gguf
import pytest
import torch
from tests.kernels.checks import threads

from quire.kernels.registry import Backend, backends
from quire.quant.rtn import quantize
from quire.quant.stored import dequantize
from quire.weight_format import WeightFormat

SEED = 5
FORMATS = [
    WeightFormat("int8"),
    WeightFormat("int8", 16),
    WeightFormat("int4", 32),
    WeightFormat("int4", 128),
    WeightFormat("int4", 16),
]
NATIVE = [backend for backend in backends("round_to_nearest") if backend != "reference"]


def weight_of(rows: int, columns: int) -> torch.Tensor:
    """Heavy tails, as trained weights have them."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randn(rows, columns, generator=generator) * torch.randn(rows, 1, generator=generator).exp()


def error_of(weight: torch.Tensor, held: WeightFormat) -> float:
    return float((dequantize(quantize(weight, held)) - weight).square().sum())


@pytest.mark.parametrize("held", FORMATS, ids=str)
def test_a_weight_is_within_half_a_step(held: WeightFormat) -> None:
    weight = weight_of(40, 256)
    found = quantize(weight, held)
    assert found.format == held
    step = found.scale.abs().repeat_interleave(256 // found.scale.shape[1], 1)
    if found.multiplier is not None:
        step = step * found.multiplier.repeat_interleave(16, 1)
    outside = (found.q == -8) | (found.q == 7) if held.kind == "int4" else torch.zeros_like(weight).bool()
    near = (
        dequantize(found) - weight
    ).abs() <= 0.6 * step  # half a step; the best scale is not the one q is rounded by
    assert near[~outside].all()
    assert found.q.abs().max() <= (8 if held.kind == "int4" else 127)


@pytest.mark.parametrize(("group", "most"), [(32, 0.95), (16, 0.9)])
def test_int4_leaves_less_error_than_q4_0(group: int, most: float) -> None:
    weight = weight_of(64, 512)
    raw = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q4_0)
    oracle = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q4_0).copy())
    ratio = error_of(weight, WeightFormat("int4", group)) / float((oracle - weight).square().sum())
    print(f"square error over Q4_0's: {ratio:.3f}, seed {SEED}")
    assert ratio < most


@pytest.mark.parametrize("held", FORMATS, ids=str)
def test_zeros_and_short_last_groups(held: WeightFormat) -> None:
    weight = weight_of(4, 75)
    weight[1] = 0.0
    weight[2, :32] = 0.0
    found = quantize(weight, held)
    assert found.q.shape == weight.shape
    assert (found.q[1] == 0).all()
    assert torch.isfinite(found.scale).all()
    padded = torch.nn.functional.pad(weight, (0, 128 - 75))
    assert torch.equal(quantize(padded, held).q[:, :75], found.q)


def with_odd_groups(weight: torch.Tensor) -> torch.Tensor:
    """Zeros, an outlier, numbers too small to divide by, NaN, infinity, ties of the largest."""
    weight[0] = 0.0
    weight[1, :32] = 0.0
    weight[2, 5] = 1e6
    weight[3] *= 1e-35
    weight[4, 2] = torch.nan
    weight[5, -1] = -torch.inf
    weight[6] = weight[6].sign()
    return weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("held", [*FORMATS, WeightFormat("int4", 64)], ids=str)
@pytest.mark.parametrize("backend", NATIVE)
def test_native_has_the_bits_of_the_reference(
    backend: Backend, held: WeightFormat, dtype: torch.dtype
) -> None:
    for rows, columns in ((7, 75), (40, 896), (33, 2048), (9, 129)):
        weight = with_odd_groups(weight_of(rows, columns)).to(dtype)
        expected = quantize(weight, held)
        wide = torch.nn.functional.pad(weight, (0, 3))
        for num_threads, source in (
            (1, weight),
            (2, weight),
            (1, wide[:, :columns]),
            (1, weight.t().contiguous().t()),
        ):
            with threads(num_threads):
                found = quantize(source, held, backend=backend)
            if expected.multiplier is not None:
                assert found.multiplier is not None
                assert torch.equal(found.multiplier, expected.multiplier), f"{rows} x {columns}, seed {SEED}"
            assert torch.equal(found.q, expected.q), f"{rows} x {columns}, seed {SEED}"
            assert torch.equal(found.scale.isnan(), expected.scale.isnan())
            assert torch.equal(found.scale.nan_to_num(-1.0), expected.scale.nan_to_num(-1.0)), f"seed {SEED}"
        assert expected.scale[4].isnan().any()
        assert not expected.q[0].any()


@pytest.mark.parametrize("held", FORMATS, ids=str)
def test_ranges_and_threads_change_nothing(held: WeightFormat) -> None:
    weight = weight_of(96, 384).bfloat16()
    whole = quantize(weight, held)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for start, stop in ((0, 1), (7, 40), (40, 96)):
            part = quantize(weight[start:stop], held)
            assert torch.equal(part.q, whole.q[start:stop])
            assert torch.equal(part.scale, whole.scale[start:stop])
    finally:
        torch.set_num_threads(before)
