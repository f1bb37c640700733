"""LayerNorm without a bias: against fp64, native against reference, and each row by itself."""

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
)

from quire.kernels import registry
from quire.kernels.norm.centered import add_centered_norm, centered_norm
from quire.kernels.registry import Backend

EPS = 1e-5
BACKENDS = registry.backends("centered_norm")


def oracle(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x.double(), x.shape[-1:], weight.double(), None, EPS)


@each("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", cases.ROWS, ids=str)
def test_against_fp64(case: cases.RowCase, dtype: torch.dtype, backend: Backend) -> None:
    """Of rows whose mean is large: alone, and as a sum that stays in fp32 or is rounded."""
    rng = generator()
    weight = torch.randn(case.size, generator=rng)
    x, residual = (torch.randn(2, case.num_tokens, case.size, generator=rng) + 3).to(dtype)
    if case.size > 1:
        assert_close("rms_norm", centered_norm.on(backend)(x, weight, EPS), oracle(x, weight))
    for wide in (False, True):
        normed, total = add_centered_norm.on(backend)(x, residual, weight, EPS, wide)
        expected = residual.float() + x.float() if wide else residual + x
        assert_same_bits(total, expected, "sum")
        if case.size > 1:
            assert_close("rms_norm", normed, oracle(expected, weight))


@each("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_and_among_others(dtype: torch.dtype, backend: Backend) -> None:
    weight = torch.randn(577, generator=generator())
    x = (torch.randn(33, 577, generator=generator(1)) - 2).to(dtype)
    assert_rows_independent(lambda ids: centered_norm.on(backend)(x[ids], weight, EPS), 33, "norm")
