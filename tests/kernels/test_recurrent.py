"""Ops of recurrent layers: against fp64, native against reference, and equal bits however tokens are cut into steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tests.kernels.checks import DTYPES, assert_close, assert_same_bits, each, generator, threads

import quire.kernels.recurrent.native  # noqa: F401  (registers the ops)
from quire.kernels import registry
from quire.kernels.output_gate import gate_rows
from quire.kernels.recurrent import NORM_EPS, causal_conv, delta_inputs, gated_delta_rule, gated_norm
from quire.kernels.registry import Backend
from quire.kernels.state_pool import StateBatch, StateView

BACKENDS = registry.backends("gated_delta_rule")
KERNEL = 4
LENGTHS = (1, 3, 17, 2, 29)  # tokens of the sequences


@dataclass(frozen=True, slots=True)
class Sizes:
    """Heads of keys and of values, and their sizes."""

    k_heads: int
    v_heads: int
    keys: int
    values: int

    @property
    def channels(self) -> int:
        return 2 * self.k_heads * self.keys + self.v_heads * self.values


# A tail of values, one head, several slices of a state, and what published models have.
SIZES = (Sizes(2, 6, 8, 12), Sizes(1, 1, 4, 1), Sizes(2, 4, 16, 37), Sizes(1, 2, 128, 128))


def view_of(sizes: Sizes, num_slots: int = 12) -> StateView:
    """Return slots full of numbers that no sequence may see."""
    state = torch.full((num_slots, sizes.v_heads, sizes.keys, sizes.values), 1e9)
    return StateView(state, torch.full((num_slots, KERNEL - 1, sizes.channels), 1e9))


def batch_of(
    lengths: tuple[int, ...],
    slots: tuple[int, ...],
    *,
    fresh: bool,
    saves: tuple[tuple[int, int, int], ...] = (),
) -> StateBatch:
    ends = np.cumsum((0, *lengths)).astype(np.int64)
    kept = np.array(saves, np.int64).reshape(-1, 3)
    return StateBatch(ends, np.array(slots, np.int64), np.full(len(slots), fresh, np.int64), kept, ())


def inputs_of(
    sizes: Sizes, tokens: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return qk, v and gates as `delta_inputs` gives them."""
    rng = generator()
    qkv = torch.randn(tokens, sizes.channels, generator=rng).to(dtype)
    a, b = torch.randn(2, tokens, sizes.v_heads, generator=rng).to(dtype)
    rate = -torch.rand(sizes.v_heads, generator=rng) * 2.0
    qk, gates = delta_inputs(
        qkv, a, b, rate, torch.randn(sizes.v_heads, generator=rng), sizes.k_heads, sizes.keys
    )
    return qk, qkv[:, 2 * sizes.k_heads * sizes.keys :], gates


def oracle(qk: torch.Tensor, v: torch.Tensor, gates: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """The rule over one sequence, in fp64."""
    state = torch.zeros(sizes.v_heads, sizes.keys, sizes.values, dtype=torch.float64)
    rows = []
    for pair, value, gate in zip(qk.double(), v.double(), gates.double(), strict=True):
        q, k = pair.repeat_interleave(sizes.v_heads // sizes.k_heads, dim=1)
        decay, beta = gate
        state = state * decay[:, None, None]
        known = torch.einsum("hkv,hk->hv", state, k)
        delta = (value.view(sizes.v_heads, -1) - known) * beta[:, None]
        state = state + torch.einsum("hk,hv->hkv", k, delta)
        rows.append(torch.einsum("hkv,hk->hv", state, q).flatten())
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rule_against_fp64(sizes: Sizes, dtype: torch.dtype) -> None:
    qk, v, gates = inputs_of(sizes, 40, dtype)
    y = gated_delta_rule(qk, v, gates, view_of(sizes), batch_of((40,), (3,), fresh=True))
    assert_close("gated_delta_rule", y, oracle(qk, v, gates, sizes))


@each("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_all_backends_give_the_same_bits(sizes: Sizes, dtype: torch.dtype, backend: Backend) -> None:
    qk, v, gates = inputs_of(sizes, sum(LENGTHS), dtype)
    views = view_of(sizes), view_of(sizes)
    saves = ((0, 1, 7), (2, 5, 8), (2, 17, 9), (4, 16, 10))
    batch = batch_of(LENGTHS, (4, 1, 0, 6, 2), fresh=True, saves=saves)
    for count in (1, 2):
        with threads(count):
            ours = gated_delta_rule.on(backend)(qk, v, gates, views[0], batch)
        assert_same_bits(ours, gated_delta_rule(qk, v, gates, views[1], batch), "outputs")
        assert_same_bits(views[0].state, views[1].state, "states")


@each("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [1, 2, 7, 16])
def test_chunks_are_the_whole_prompt(chunk: int, dtype: torch.dtype, backend: Backend) -> None:
    """Outputs, states and pasts: in chunks beside another sequence, and from a checkpoint, as in one step alone."""
    sizes, length = SIZES[0], 37
    rule, conv = gated_delta_rule.on(backend), causal_conv.on(backend)
    qk, v, gates = inputs_of(sizes, length, dtype)
    x = torch.randn(length, sizes.channels, generator=generator(1)).to(dtype)
    weight = torch.randn(KERNEL, sizes.channels, generator=generator(2))
    whole, parts = view_of(sizes), view_of(sizes)
    cut = batch_of((length,), (3,), fresh=True, saves=((0, 16, 5),))
    expected = rule(qk, v, gates, whole, cut), conv(x, weight, whole, cut)
    for start in range(0, length, chunk):
        rows = slice(start, min(start + chunk, length))
        size = rows.stop - rows.start
        batch = batch_of((size, size), (3, 9), fresh=start == 0)
        twice = [torch.cat((part[rows], part[rows])) for part in (qk, v, gates, x)]
        y = rule(*twice[:3], parts, batch)
        assert_same_bits(y, torch.cat((expected[0][rows],) * 2), f"rule from token {start}")
        z = conv(twice[3], weight, parts, batch)
        assert_same_bits(z, torch.cat((expected[1][rows],) * 2), f"convolution from token {start}")
    for slot in (3, 9):
        assert_same_bits(parts.state[slot], whole.state[3], "state")
        assert_same_bits(parts.past[slot], whole.past[3], "past")
    rest = slice(16, length)
    batch = batch_of((length - 16,), (5,), fresh=False)
    assert_same_bits(
        rule(qk[rest], v[rest], gates[rest], whole, batch), expected[0][rest], "rule from a checkpoint"
    )
    assert_same_bits(conv(x[rest], weight, whole, batch), expected[1][rest], "convolution from a checkpoint")


@each("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 2, 3, 4, 30])
def test_convolution_against_fp64(length: int, dtype: torch.dtype, backend: Backend) -> None:
    sizes, rng = SIZES[2], generator()
    fused = torch.randn(length, sizes.channels + 5, generator=rng).to(dtype)
    x, weight = fused[:, : sizes.channels], torch.randn(KERNEL, sizes.channels, generator=rng)
    y = causal_conv.on(backend)(x, weight, view_of(sizes), batch_of((length,), (1,), fresh=True))
    rows = torch.cat((torch.zeros(KERNEL - 1, sizes.channels), x)).double()
    total = sum(weight[j].double() * rows[j : j + length] for j in range(KERNEL))
    assert isinstance(total, torch.Tensor)
    assert_close("gated", y, total * torch.sigmoid(total))


@each("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_inputs_against_fp64(sizes: Sizes, dtype: torch.dtype, backend: Backend) -> None:
    rng = generator()
    fused = (torch.randn(9, sizes.channels + 2 * sizes.v_heads, generator=rng) * 9).to(dtype)
    qkv, a, b = fused.split((sizes.channels, sizes.v_heads, sizes.v_heads), dim=1)
    rate, bias = -torch.rand(sizes.v_heads, generator=rng) * 8, torch.randn(sizes.v_heads, generator=rng)
    qk, gates = delta_inputs.on(backend)(qkv, a, b, rate, bias, sizes.k_heads, sizes.keys)
    heads = qkv[:, : 2 * sizes.k_heads * sizes.keys].double().unflatten(1, (2, sizes.k_heads, sizes.keys))
    unit = heads / (heads.pow(2).sum(-1, keepdim=True) + NORM_EPS).sqrt()
    unit[:, 0] /= sizes.keys**0.5
    softplus = torch.nn.functional.softplus(a.double() + bias.double())
    assert_close("rms_norm", qk, unit)
    assert_close(
        "pointwise", gates, torch.stack(((rate.double() * softplus).exp(), b.double().sigmoid()), dim=1)
    )


@each("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 37, 128])
def test_gated_norm_and_gate_against_fp64(size: int, dtype: torch.dtype, backend: Backend) -> None:
    rng = generator()
    x, weight = torch.randn(7, 3 * size, generator=rng).to(dtype), torch.randn(size, generator=rng)
    z = torch.randn(7, 3 * size + 4, generator=rng).to(dtype)[:, 2 : 2 + 3 * size]
    heads = x.double().unflatten(1, (3, size))
    normed = heads / (heads.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    gate = z.double() * z.double().sigmoid()
    assert_close("gated", gated_norm.on(backend)(x, z, weight, 1e-6), normed.flatten(1) * gate)
    assert_close("gated", gate_rows.on(backend)(x, z), x.double() * z.double().sigmoid())
