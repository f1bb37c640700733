"""Linears that write a range of the columns of a wider result: a fused linear whose parts differ in format."""

from __future__ import annotations

import pytest
import torch
from tests.kernels import cases, test_linear, test_quantized_linear
from tests.kernels.checks import DTYPES, assert_same_bits, each, generator

from quire.families.gguf_types import BLOCK_TYPES
from quire.kernels import registry
from quire.kernels.linear import PackedLinear, linear
from quire.kernels.registry import Backend
from quire.weight_format import PLAIN, WeightFormat

FORMATS = [
    PLAIN,
    WeightFormat("int8"),
    WeightFormat("int8", 16),
    WeightFormat("int4", 32, True),
    WeightFormat("int4", 16),
    BLOCK_TYPES["q5_k"].held,
]
ROWS = (1, 2, 7, 33, 80)
FILL = 7.0


def make(case: cases.LinearCase, format: WeightFormat, dtype: torch.dtype, backend: Backend) -> PackedLinear:
    if format.quantized:
        return test_quantized_linear.make(case, format, dtype, backend)[0]
    return test_linear.make(case, dtype, backend)[0]


@each("backend", registry.backends("linear"))
@pytest.mark.parametrize("format", FORMATS, ids=test_quantized_linear.case_id)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_features", "bias"), [(70, True), (96, True), (95, False), (96, False)])
def test_only_its_columns_are_written(
    out_features: int, bias: bool, dtype: torch.dtype, format: WeightFormat, backend: Backend
) -> None:
    """Without a bias, whole vectors go straight to the result: with 95 columns the last one must not."""
    packed = make(cases.LinearCase(1, 96, out_features, bias=bias), format, dtype, backend)
    for rows in ROWS:
        x = torch.randn(rows, 96, generator=generator(rows)).to(dtype)
        for out_dtype in (None, torch.float32):
            expected = linear(x, packed, out_dtype=out_dtype)
            wide = torch.full((rows, out_features + 40), FILL, dtype=expected.dtype)
            found = linear(x, packed, out_dtype=out_dtype, out=wide[:, 21 : 21 + out_features])
            assert found.data_ptr() == wide[:, 21:].data_ptr()
            assert_same_bits(wide[:, 21 : 21 + out_features].contiguous(), expected, f"{rows} rows")
            assert (wide[:, :21] == FILL).all()
            assert (wide[:, 21 + out_features :] == FILL).all()


def test_a_result_that_does_not_fit_is_refused() -> None:
    packed = make(cases.LinearCase(1, 96, 70), PLAIN, torch.float32, "reference")
    x = torch.zeros(3, 96)
    for out in (
        torch.zeros(3, 71),
        torch.zeros(4, 70),
        torch.zeros(3, 70).bfloat16(),
        torch.zeros(70, 3).t(),
    ):
        with pytest.raises(AssertionError):
            linear(x, packed, out=out)
