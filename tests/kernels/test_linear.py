"""Linears against fp64, and the claim that a row's bits depend on the row alone."""

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
from quire.kernels.linear import (
    PackedLinear,
    head_linear,
    linear,
    pack_empty,
    pack_heads,
    read_rows,
    write_bias,
    write_rows,
)
from quire.kernels.registry import Backend

SMALL = [case for case in cases.LINEAR if not case.bench]


def make(
    case: cases.LinearCase, dtype: torch.dtype, backend: Backend
) -> tuple[PackedLinear, torch.Tensor, torch.Tensor]:
    rng = generator()
    weight = torch.randn(case.out_features, case.in_features, generator=rng).to(dtype)
    bias = torch.randn(case.out_features, generator=rng).to(dtype)
    packed = pack_empty(case.out_features, case.in_features, dtype, bias=case.bias, backend=backend)
    cut = case.out_features // 3  # in two parts, as fused matrices arrive
    write_rows(packed, 0, weight[:cut])
    write_rows(packed, cut, weight[cut:])
    if case.bias:
        write_bias(packed, 0, bias[:cut])
        write_bias(packed, cut, bias[cut:])
    else:
        bias = torch.zeros_like(bias)
    return packed, weight, bias


@each("backend", registry.backends("linear"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_against_fp64(case: cases.LinearCase, dtype: torch.dtype, backend: Backend) -> None:
    packed, weight, bias = make(case, dtype, backend)
    x = torch.randn(case.num_tokens, case.in_features, generator=generator(3)).to(dtype)
    assert_close("linear", linear(x, packed), x.double() @ weight.double().T + bias.double())


@each("backend", registry.backends("linear"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("in_features", "out_features"), [(33, 70), (64, 96), (96, 250), (544, 224)])
def test_rows_come_back_as_written(
    in_features: int, out_features: int, dtype: torch.dtype, backend: Backend
) -> None:
    """Whole panels and parts of panels, each with and without a whole number of vectors in a row."""
    packed, weight, _ = make(cases.LinearCase(1, in_features, out_features), dtype, backend)
    ids = torch.cat((torch.tensor([out_features - 1, 0, 5, 5]), torch.arange(out_features)))
    assert_same_bits(read_rows(packed, ids), weight[ids], "read_rows")


@each("backend", registry.backends("linear"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [case for case in SMALL if case.num_tokens], ids=str)
def test_a_row_does_not_depend_on_the_batch(
    case: cases.LinearCase, dtype: torch.dtype, backend: Backend
) -> None:
    packed, _, _ = make(case, dtype, backend)
    pool = torch.randn(37, case.in_features, generator=generator(4)).to(dtype)
    assert_rows_independent(lambda ids: linear(pool[ids], packed), 37, str(case))


@each("backend", registry.backends("linear"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_beyond_one_pass(dtype: torch.dtype, backend: Backend) -> None:
    """Kernels go over the weights once per 512 rows (at level amx, 256 for bf16)."""
    packed, _, _ = make(cases.LinearCase(1, 33, 40), dtype, backend)
    pool = torch.randn(37, 33, generator=generator(4)).to(dtype)
    ids = torch.arange(1100) % 37
    assert_same_bits(linear(pool[ids], packed), linear(pool, packed)[ids], "1,100 rows")


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_shapes_any_threads(dtype: torch.dtype) -> None:
    """The claim of `kernels.linear.reference`, over a grid of padded shapes and up to 4 threads.

    Left to itself, MKL cuts the sums of in_features ≥ 1024 between the threads on Intel CPUs.
    """
    for in_features in (32, 96, 288, 576, 1536, 8192):
        for out_features in (32, 64, 160, 512, 1056):
            packed, _, _ = make(cases.LinearCase(1, in_features, out_features), dtype, "reference")
            pool = torch.randn(40, in_features, generator=generator(5)).to(dtype)
            with threads(1):
                expected = linear(pool, packed)
            ids = torch.randperm(40, generator=generator(6))
            for count in (1, 2, 3, 4):
                with threads(count):
                    what = f"{in_features} x {out_features}, {count} threads"
                    assert_same_bits(linear(pool[ids], packed), expected[ids], what)
                    assert_same_bits(linear(pool[3:4], packed), expected[3:4], what)


@each("backend", registry.backends("linear"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_rows(dtype: torch.dtype, backend: Backend) -> None:
    packed, _, _ = make(cases.LinearCase(1, 32, 48), dtype, backend)
    wide = torch.randn(32, 80, generator=generator(7)).to(dtype)
    assert_same_bits(linear(wide[:, 16:48], packed), linear(wide[:, 16:48].contiguous(), packed), "strided")


@each("backend", registry.backends("head_linear"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "in_size", "out_size"), [(5, 16, 32), (3, 7, 33), (16, 128, 512)])
def test_head_linear(dtype: torch.dtype, heads: int, in_size: int, out_size: int, backend: Backend) -> None:
    rng = generator()
    weight = torch.randn(heads, in_size, out_size, generator=rng).to(dtype)
    pool = torch.randn(35, heads, in_size, generator=rng).to(dtype)
    packed = pack_heads(weight, backend=backend)
    oracle = torch.einsum("thi,hio->tho", pool.double(), weight.double())
    assert_close("head_linear", head_linear(pool, packed), oracle)
    assert_rows_independent(lambda ids: head_linear(pool[ids], packed), 35, "head_linear")
