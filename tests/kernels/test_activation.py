"""Gated activations: against fp64, and the same bits at every place in a tensor."""

from __future__ import annotations

import math

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
)

from quire.kernels import registry
from quire.kernels.activation import UNGATED, activated, activated_to_int8
from quire.kernels.linear import quantize_rows
from quire.kernels.pointwise import ActivationKind, gated, gated_to_int8
from quire.kernels.registry import Backend


def oracle(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, -1)
    if kind == "silu":
        return gate / (1 + torch.exp(-gate)) * up
    if kind == "gelu":
        return gate / 2 * (1 + torch.erf(gate / math.sqrt(2))) * up
    if kind == "gelu_tanh":
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return gate / 2 * (1 + torch.tanh(inner)) * up
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)


@each("backend", registry.backends("gated"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", cases.ACTIVATIONS)
def test_against_fp64(kind: ActivationKind, dtype: torch.dtype, backend: Backend) -> None:
    for case in cases.ROWS:
        if not case.bench:
            x = (torch.randn(case.num_tokens, 2 * case.size, generator=generator()) * 4).to(dtype)
            assert_close("gated", gated.on(backend)(x, kind), oracle(x, kind))


@each("backend", registry.backends("gated"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", cases.ACTIVATIONS)
@pytest.mark.parametrize("size", [1, 7, 16, 31, 33, 172, 577])
def test_a_row_does_not_depend_on_the_batch(
    size: int, kind: ActivationKind, dtype: torch.dtype, backend: Backend
) -> None:
    pool = (torch.randn(37, 2 * size, generator=generator()) * 4).to(dtype)
    assert_rows_independent(lambda ids: gated.on(backend)(pool[ids], kind), 37, f"{kind} {size}")


@each("backend", registry.backends("gated"))
@pytest.mark.parametrize("kind", cases.ACTIVATIONS)
def test_the_place_of_an_element_does_not_matter(kind: ActivationKind, backend: Backend) -> None:
    """A vectorised loop ends in a scalar tail, and torch's own silu and gelu differ there in the last bit."""
    values = torch.linspace(-12, 12, 4001).repeat(2, 1)  # gate and up
    expected = gated.on(backend)(values.T.reshape(-1, 2).contiguous(), kind).view(-1)
    for width in (1, 3, 5, 13, 17, 29, 31, 100):
        count = 4001 // width * width
        rows = values[:, :count].reshape(2, -1, width).transpose(0, 1).reshape(-1, 2 * width).contiguous()
        assert_same_bits(gated.on(backend)(rows, kind).view(-1), expected[:count], f"{kind}, rows of {width}")


@each("backend", registry.backends("gated"))
def test_extremes_are_finite(backend: Backend) -> None:
    x = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4, 1.0, 1.0, 1.0, 1.0, 1.0]])
    for kind in cases.ACTIVATIONS:
        assert torch.isfinite(gated.on(backend)(x, kind)).all(), kind


@each("backend", registry.backends("gated"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_rows(dtype: torch.dtype, backend: Backend) -> None:
    wide = torch.randn(9, 100, generator=generator()).to(dtype)[:, 7:49]
    expected = gated.on(backend)(wide.contiguous(), "silu")
    assert_same_bits(gated.on(backend)(wide, "silu"), expected, "strided")


@each("backend", registry.backends("gated"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", cases.ACTIVATIONS)
def test_to_int8_is_the_activation_quantized(
    kind: ActivationKind, dtype: torch.dtype, backend: Backend
) -> None:
    for num_tokens, size in ((0, 16), (1, 7), (37, 172), (65, 577), (5, 192)):
        x = (torch.randn(num_tokens, 2 * size, generator=generator()) * 4).to(dtype)
        y = gated.on(backend)(x, kind)
        for format in cases.row_formats(size):
            rows = gated_to_int8.on(backend)(x, kind, format)
            assert_same_rows(rows, quantize_rows(y, format), f"{num_tokens} x {size}, {format}")


@each("backend", registry.backends("activated"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", UNGATED)
@pytest.mark.parametrize(("num_tokens", "size"), [(0, 16), (1, 7), (37, 172), (5, 577)])
def test_activation_without_a_gate(
    num_tokens: int, size: int, kind: ActivationKind, dtype: torch.dtype, backend: Backend
) -> None:
    x, alphas = (torch.randn(num_tokens, size, generator=generator()) * 4).to(dtype), (0.7, 1.3)
    y, wide = activated.on(backend)(x, kind, 1.0, alphas), x.double()
    expected = wide.clamp(min=0) ** 2
    if kind == "xielu":
        negative = (torch.expm1(wide.clamp(max=-1e-6)) - wide) * alphas[1]
        expected = torch.where(wide > 0, wide**2 * alphas[0], negative) + wide / 2
    assert_close("gated", y, expected)
    for format in cases.row_formats(size):
        rows = activated_to_int8.on(backend)(x, kind, format, 1.0, alphas)
        assert_same_rows(rows, quantize_rows(y, format))


@each("backend", registry.backends("activated"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_is_scaled_before_its_function(dtype: torch.dtype, backend: Backend) -> None:
    x = (torch.randn(9, 74, generator=generator()) * 4).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    expected = oracle(torch.cat((gate * 0.3, up), dim=-1), "silu")
    assert_close("gated", activated.on(backend)(x, "silu", 0.3), expected)
