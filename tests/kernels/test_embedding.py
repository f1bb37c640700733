"""Rows of a table, plain and out of a packed weight; sums, scales and caps of rows."""

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
from quire.kernels.linear import pack_empty, read_rows, write_rows
from quire.kernels.pointwise import add_rows, cap_logits, scale_rows, take_rows
from quire.kernels.registry import Backend


@pytest.mark.parametrize("dtype", DTYPES)
@each("backend", registry.backends("take_rows"))
@pytest.mark.parametrize("case", cases.ROWS, ids=str)
def test_rows(case: cases.RowCase, backend: Backend, dtype: torch.dtype) -> None:
    rng = generator()
    wide = torch.randn(101, case.size + 3, generator=rng).to(dtype)
    ids = torch.randint(101, (case.num_tokens,), generator=rng)
    for table in (wide[:, : case.size].contiguous(), wide[:, 1 : case.size + 1]):
        assert_same_bits(take_rows.on(backend)(table, ids), table[ids], "rows")


@pytest.mark.parametrize("dtype", DTYPES)
@each("backend", registry.backends("linear.read_rows"))
@pytest.mark.parametrize("case", cases.ROWS, ids=str)
def test_rows_of_a_packed_weight(case: cases.RowCase, backend: Backend, dtype: torch.dtype) -> None:
    rng = generator()
    weight = torch.randn(101, case.size, generator=rng).to(dtype)
    packed = pack_empty(101, case.size, dtype, bias=False, backend=backend)
    write_rows(packed, 0, weight)
    ids = torch.randint(101, (case.num_tokens,), generator=rng)
    assert_same_bits(read_rows(packed, ids), weight[ids], "rows")


@pytest.mark.parametrize("dtype", DTYPES)
@each("backend", registry.backends("add_rows"))
@pytest.mark.parametrize("case", cases.ROWS, ids=str)
def test_sums_and_scales(case: cases.RowCase, backend: Backend, dtype: torch.dtype) -> None:
    rng = generator()
    wide = torch.randn(case.num_tokens, 2 * case.size, generator=rng).to(dtype)
    x, other = wide[:, : case.size], wide[:, case.size :]
    before = wide.clone()
    with threads(2):
        assert_same_bits(add_rows.on(backend)(x, other), x + other, "sum")
        assert_same_bits(scale_rows.on(backend)(x, 0.37), x * 0.37, "scale")
    assert_same_bits(wide, before, "the arguments")


@each("backend", registry.backends("cap_logits"))
@pytest.mark.parametrize("cap", [None, 5.0])
def test_caps(cap: float | None, backend: Backend) -> None:
    logits = torch.randn(33, 1031, generator=generator()) * 20
    oracle = logits.double() * 0.7
    if cap is not None:
        oracle = cap * torch.tanh(oracle / cap)
    assert_close("pointwise", cap_logits.on(backend)(logits.clone(), 0.7, cap), oracle)
    assert_rows_independent(
        lambda ids: cap_logits.on(backend)(logits[ids], 0.7, cap), 33, f"cap {cap}, {backend}"
    )
