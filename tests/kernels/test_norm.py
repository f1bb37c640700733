"""RMSNorm against fp64, and its independence of the batch."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from tests.kernels import cases
from tests.kernels.checks import (
    DTYPES,
    assert_close,
    assert_rows_independent,
    assert_same_bits,
    assert_same_rows,
    each,
    generator,
    runner_config,
    threads,
)

from quire.kernels import registry
from quire.kernels.linear import QuantizedRows, QuantizedWeight, linear, quantize_rows, write_rows
from quire.kernels.norm import add_rms_norm, add_rms_norm_to_int8, rms_norm, rms_norm_to_int8
from quire.kernels.pointwise import add_rows, gated
from quire.kernels.registry import Backend
from quire.layers.mlp import Mlp
from quire.layers.norm import RmsNorm
from quire.layers.weights import Build
from quire.weight_format import WeightFormat

EPS = 1e-5
BACKENDS = registry.backends("rms_norm")


def oracle(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@each("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", cases.ROWS, ids=str)
def test_against_fp64(case: cases.RowCase, dtype: torch.dtype, backend: Backend) -> None:
    rng = generator()
    weight = torch.randn(case.size, generator=rng)
    x = torch.randn(case.num_tokens, case.size, generator=rng).to(dtype)
    residual = torch.randn(case.num_tokens, case.size, generator=rng).to(dtype)
    assert_close("rms_norm", rms_norm.on(backend)(x, weight, EPS), oracle(x, weight))
    normed, total = add_rms_norm.on(backend)(x, residual.clone(), weight, EPS)
    assert_same_bits(total, residual + x, "residual")
    assert_close("rms_norm", normed, oracle(residual + x, weight))


@each("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 64, 100, 577])
def test_a_wide_sum_is_not_rounded(size: int, dtype: torch.dtype, backend: Backend) -> None:
    """A residual may be of the model's type, as embeddings are, or a sum of before."""
    rng = generator()
    weight, first = torch.randn(size, generator=rng), torch.randn(7, size, generator=rng) * 3
    x = torch.randn(7, size, generator=rng).to(dtype)
    for residual in (first.to(dtype), first):
        normed, total = add_rms_norm.on(backend)(x, residual.clone(), weight, EPS, True)
        assert total.dtype == torch.float32
        assert_same_bits(total, residual.float() + x.float(), "sum")
        assert normed.dtype == dtype
        assert_close("rms_norm", normed, oracle(total, weight))
        for format in cases.row_formats(size):
            rows, same = add_rms_norm_to_int8.on(backend)(x, residual.clone(), weight, EPS, format, True)
            assert_same_rows(rows, quantize_rows(normed, format))
            assert_same_bits(same, total, "sum")
        assert_same_bits(add_rows.on(backend)(total, x), (total + x.float()).to(dtype), "add_rows")


@each("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", sorted({case.size for case in cases.ROWS} | {4096, 8192}))
def test_a_row_does_not_depend_on_the_batch(size: int, dtype: torch.dtype, backend: Backend) -> None:
    rng = generator()
    weight = torch.randn(size, generator=rng)
    pool = (torch.randn(35, size, generator=rng) * 3).to(dtype)
    other = torch.randn(35, size, generator=rng).to(dtype)
    assert_rows_independent(lambda ids: rms_norm.on(backend)(pool[ids], weight, EPS), 35, f"rms_norm {size}")
    assert_rows_independent(
        lambda ids: add_rms_norm.on(backend)(pool[ids], other[ids], weight, EPS)[0],
        35,
        f"add_rms_norm {size}",
    )


@each("backend", BACKENDS)
def test_heads_with_strides(backend: Backend) -> None:
    """q and k norms run on slices of a fused projection."""
    rng = generator()
    fused = torch.randn(9, 6 * 16, generator=rng)
    weight = torch.randn(16, generator=rng)
    heads = fused[:, 16:64].unflatten(-1, (3, 16))
    assert_same_bits(
        rms_norm.on(backend)(heads, weight, EPS),
        rms_norm.on(backend)(heads.contiguous(), weight, EPS),
        "strided heads",
    )


@each("backend", BACKENDS)
def test_a_weight_for_every_head(backend: Backend) -> None:
    rng = generator()
    x, weight = torch.randn(9, 3, 16, generator=rng), torch.randn(3, 16, generator=rng)
    assert_close("rms_norm", rms_norm.on(backend)(x, weight, EPS), oracle(x, weight))


@each("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "case",
    # The long one, also elsewhere in this file, takes two seconds per backend here.
    [pytest.param(case, marks=[pytest.mark.slow] * (case.num_tokens > 100)) for case in cases.ROWS],
    ids=str,
)
def test_to_int8_is_the_norm_quantized(case: cases.RowCase, dtype: torch.dtype, backend: Backend) -> None:
    rng = generator()
    weight = torch.randn(case.size, generator=rng)
    x, residual = torch.randn(2, case.num_tokens, case.size, generator=rng).to(dtype)
    for format, count in product(cases.row_formats(case.size), (1, 2)):
        with threads(count):
            expected = quantize_rows(rms_norm.on(backend)(x, weight, EPS), format)
            assert_same_rows(rms_norm_to_int8.on(backend)(x, weight, EPS, format), expected)
            normed, total = add_rms_norm.on(backend)(x, residual.clone(), weight, EPS)
            rows, same_total = add_rms_norm_to_int8.on(backend)(x, residual.clone(), weight, EPS, format)
            assert_same_rows(rows, quantize_rows(normed, format))
            assert_same_bits(same_total, total, "residual")


@each("backend", BACKENDS)
def test_a_block_of_quantized_linears_is_its_ops_one_by_one(backend: Backend) -> None:
    """Norm and activation of a model write int8 rows; the bits are those of plain rows quantized by the linears."""
    rng = generator()
    kernels, held = registry.choose(runner_config(backend)), WeightFormat("int8")
    formats = {f"{x}.weight": held for x in ("gate", "up", "down")}
    build = Build(torch.bfloat16, kernels, EPS, formats=formats)
    mlp = Mlp(64, 96, "silu", build)
    for name, shape in (("gate", (96, 64)), ("up", (96, 64)), ("down", (64, 96))):
        q = torch.randint(-127, 128, shape, generator=rng).to(torch.int8)
        weight = QuantizedWeight(held, q, torch.rand(shape[0], 1, generator=rng) * 0.01)
        place = mlp._down if name == "down" else mlp._gate_up
        write_rows(place.packed, 96 * (name == "up"), weight)
    norm = RmsNorm(64, build, reader=mlp.reads)
    norm.weight.copy_(torch.randn(64, generator=rng))
    x, residual = torch.randn(2, 9, 64, generator=rng).to(torch.bfloat16)
    rows, total = norm.enter(x, residual.clone())
    assert isinstance(rows, QuantizedRows)
    normed, expected_total = norm.add(x, residual.clone())
    assert_same_bits(total, expected_total, "residual")
    gate_up = linear(normed, mlp._gate_up.packed)
    assert_same_bits(mlp(rows), linear(gated.on(backend)(gate_up, "silu"), mlp._down.packed), "block")
    assert isinstance(norm.enter(None, residual)[0], QuantizedRows)
