"""RMSNorm against fp64, and its independence of the batch."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.checks import (
    DTYPES,
    assert_close,
    assert_rows_independent,
    assert_same_bits,
    assert_same_rows,
    generator,
    threads,
)

from quire.kernels import cases, registry
from quire.kernels.linear import quantize_rows
from quire.kernels.norm import add_rms_norm, add_rms_norm_to_int8, rms_norm, rms_norm_to_int8
from quire.kernels.registry import Backend

EPS = 1e-5
BACKENDS = registry.backends("rms_norm")


def oracle(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", cases.ROWS, ids=str)
def test_against_fp64(case: cases.RowCase, dtype: torch.dtype, backend: Backend) -> None:
    rng = generator()
    weight = torch.randn(case.size, generator=rng)
    x = torch.randn(case.num_tokens, case.size, generator=rng).to(dtype)
    residual = torch.randn(case.num_tokens, case.size, generator=rng).to(dtype)
    assert_close("rms_norm", rms_norm(x, weight, EPS, backend=backend), oracle(x, weight))
    normed, total = add_rms_norm(x, residual.clone(), weight, EPS, backend=backend)
    assert_same_bits(total, residual + x, "residual")
    assert_close("rms_norm", normed, oracle(residual + x, weight))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", sorted({case.size for case in cases.ROWS} | {4096, 8192}))
def test_a_row_does_not_depend_on_the_batch(size: int, dtype: torch.dtype, backend: Backend) -> None:
    rng = generator()
    weight = torch.randn(size, generator=rng)
    pool = (torch.randn(35, size, generator=rng) * 3).to(dtype)
    other = torch.randn(35, size, generator=rng).to(dtype)
    assert_rows_independent(
        lambda ids: rms_norm(pool[ids], weight, EPS, backend=backend), 35, f"rms_norm {size}"
    )
    assert_rows_independent(
        lambda ids: add_rms_norm(pool[ids], other[ids], weight, EPS, backend=backend)[0],
        35,
        f"add_rms_norm {size}",
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_heads_with_strides(backend: Backend) -> None:
    """q and k norms run on slices of a fused projection."""
    rng = generator()
    fused = torch.randn(9, 6 * 16, generator=rng)
    weight = torch.randn(16, generator=rng)
    heads = fused[:, 16:64].unflatten(-1, (3, 16))
    assert_same_bits(
        rms_norm(heads, weight, EPS, backend=backend),
        rms_norm(heads.contiguous(), weight, EPS, backend=backend),
        "strided heads",
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_weight_for_every_head(backend: Backend) -> None:
    rng = generator()
    x, weight = torch.randn(9, 3, 16, generator=rng), torch.randn(3, 16, generator=rng)
    assert_close("rms_norm", rms_norm(x, weight, EPS, backend=backend), oracle(x, weight))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [None, 32])
@pytest.mark.parametrize("case", cases.ROWS, ids=str)
def test_to_int8_is_the_norm_quantized(
    case: cases.RowCase, group: int | None, dtype: torch.dtype, backend: Backend
) -> None:
    rng = generator()
    weight = torch.randn(case.size, generator=rng)
    x, residual = torch.randn(2, case.num_tokens, case.size, generator=rng).to(dtype)
    for count in (1, 2):
        with threads(count):
            expected = quantize_rows(rms_norm(x, weight, EPS, backend=backend), group)
            assert_same_rows(rms_norm_to_int8(x, weight, EPS, group, backend=backend), expected)
            normed, total = add_rms_norm(x, residual.clone(), weight, EPS, backend=backend)
            rows, same_total = add_rms_norm_to_int8(x, residual.clone(), weight, EPS, group, backend=backend)
            assert_same_rows(rows, quantize_rows(normed, group))
            assert_same_bits(same_total, total, "residual")
