"""The delta rule with a decay per channel: against fp64, all backends alike, and equal bits however tokens are cut."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.checks import DTYPES, assert_close, assert_same_bits, each, generator, threads
from tests.kernels.test_recurrent import LENGTHS, Sizes, batch_of, view_of

import quire.kernels.recurrent.native  # noqa: F401  (registers the ops)
from quire.kernels import registry
from quire.kernels.recurrent import NORM_EPS, gated_delta_rule, gated_norm
from quire.kernels.recurrent.channel_delta import channel_delta_rule, channel_inputs
from quire.kernels.registry import Backend

BACKENDS = registry.backends("channel_delta_rule")
# A tail of values, one head, several slices of a state, and what published models have.
SIZES = (Sizes(3, 3, 8, 12), Sizes(1, 1, 4, 1), Sizes(2, 2, 16, 37), Sizes(2, 2, 128, 128))


def inputs_of(sizes: Sizes, tokens: int, dtype: torch.dtype, floor: float | None) -> tuple[torch.Tensor, ...]:
    """Return the rows before `channel_inputs`, its vectors, and what they give."""
    rng, heads, keys = generator(), sizes.v_heads, sizes.keys
    qkv = torch.randn(tokens, sizes.channels, generator=rng).to(dtype)
    f = torch.randn(tokens, heads * keys, generator=rng).to(dtype)
    b = torch.randn(tokens, heads, generator=rng).to(dtype)
    rate, bias = -torch.rand(heads, generator=rng) * 2, torch.randn(heads * keys, generator=rng)
    return qkv, f, b, rate, bias, *channel_inputs(qkv, f, b, rate, bias, keys, floor)


@each("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_inputs_against_fp64(sizes: Sizes, dtype: torch.dtype, backend: Backend) -> None:
    heads, keys = sizes.v_heads, sizes.keys
    for floor in (None, -5.0):
        qkv, f, b, rate, bias, *_ = inputs_of(sizes, 9, dtype, floor)
        qkd, beta = channel_inputs.on(backend)(qkv, f, b, rate, bias, keys, floor)
        rows = qkv[:, : 2 * heads * keys].double().unflatten(1, (2, heads, keys))
        unit = rows / (rows.pow(2).sum(-1, keepdim=True) + NORM_EPS).sqrt()
        unit[:, 0] /= keys**0.5
        assert_close("rms_norm", qkd[:, :2], unit)
        inner, rates = (f.double() + bias.double()).unflatten(1, (heads, keys)), rate.double()[:, None]
        if floor is None:
            logs = rates * torch.nn.functional.softplus(inner)
        else:
            logs = floor * torch.sigmoid(-rates * inner)
        assert_close("pointwise", qkd[:, 2], logs.exp())
        assert_close("pointwise", beta, b.double().sigmoid())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rule_against_fp64(sizes: Sizes, dtype: torch.dtype) -> None:
    *_, qkd, beta = inputs_of(sizes, 40, dtype, None)
    v = torch.randn(40, sizes.v_heads * sizes.values, generator=generator(1)).to(dtype)
    y = channel_delta_rule(qkd, v, beta, view_of(sizes), batch_of((40,), (3,), fresh=True))
    state, rows = torch.zeros(sizes.v_heads, sizes.keys, sizes.values, dtype=torch.float64), []
    for (q, k, decays), value, step in zip(qkd.double(), v.double(), beta.double(), strict=True):
        state = state * decays[:, :, None]
        delta = (value.view(sizes.v_heads, -1) - torch.einsum("hkv,hk->hv", state, k)) * step[:, None]
        state = state + torch.einsum("hk,hv->hkv", k, delta)
        rows.append(torch.einsum("hkv,hk->hv", state, q).flatten())
    assert_close("gated_delta_rule", y, torch.stack(rows))


@each("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_all_backends_give_the_same_bits(sizes: Sizes, dtype: torch.dtype, backend: Backend) -> None:
    tokens = sum(LENGTHS)
    *_, qkd, beta = inputs_of(sizes, tokens, dtype, -5.0)
    v = torch.randn(tokens, sizes.v_heads * sizes.values, generator=generator(1)).to(dtype)
    views = view_of(sizes), view_of(sizes)
    batch = batch_of(
        LENGTHS, (4, 1, 0, 6, 2), fresh=True, saves=((0, 1, 7), (2, 5, 8), (2, 17, 9), (4, 16, 10))
    )
    for count in (1, 2):
        with threads(count):
            ours = channel_delta_rule.on(backend)(qkd, v, beta, views[0], batch)
        assert_same_bits(ours, channel_delta_rule(qkd, v, beta, views[1], batch), "outputs")
        assert_same_bits(views[0].state, views[1].state, "states")


@each("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunks_are_the_whole_prompt(chunk: int, backend: Backend) -> None:
    """Outputs and states in chunks, and from a checkpoint; with equal decays they are those of the other rule."""
    sizes, length = SIZES[0], 37
    *_, qkd, beta = inputs_of(sizes, length, torch.float32, None)
    v = torch.randn(length, sizes.v_heads * sizes.values, generator=generator(1))
    rule, whole, parts = channel_delta_rule.on(backend), view_of(sizes), view_of(sizes)
    expected = rule(qkd, v, beta, whole, batch_of((length,), (3,), fresh=True, saves=((0, 16, 5),)))
    for start in range(0, length, chunk):
        rows = slice(start, min(start + chunk, length))
        batch = batch_of((rows.stop - rows.start,), (9,), fresh=start == 0)
        assert_same_bits(
            rule(qkd[rows], v[rows], beta[rows], parts, batch), expected[rows], f"from token {start}"
        )
    assert_same_bits(parts.state[9], whole.state[3], "state")
    rest = batch_of((length - 16,), (5,), fresh=False)
    assert_same_bits(rule(qkd[16:], v[16:], beta[16:], whole, rest), expected[16:], "from a checkpoint")
    qkd[:, 2] = qkd[:, 2, :, :1]
    ours = rule(qkd, v, beta, whole, batch_of((length,), (3,), fresh=True))
    gates = torch.stack((qkd[:, 2, :, 0], beta), dim=1)
    other = gated_delta_rule.on(backend)(
        qkd[:, :2].contiguous(), v, gates, parts, batch_of((length,), (3,), fresh=True)
    )
    assert_same_bits(ours, other, "one decay per head")


@each("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_with_a_plain_gate_against_fp64(dtype: torch.dtype, backend: Backend) -> None:
    x, z = torch.randn(2, 7, 3 * 37, generator=generator()).to(dtype)
    weight = torch.randn(37, generator=generator(1))
    heads = x.double().unflatten(1, (3, 37))
    normed = heads / (heads.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    y = gated_norm.on(backend)(x, z, weight, 1e-6, is_plain=True)
    assert_close("gated", y, normed.flatten(1) * z.double().sigmoid())
