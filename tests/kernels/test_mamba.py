"""Ops of Mamba-2 and of short convolutions: against fp64, native against reference, equal bits in any chunks."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.checks import DTYPES, assert_close, assert_same_bits, each, generator, threads
from tests.kernels.test_recurrent import KERNEL, LENGTHS, SIZES, Sizes, batch_of, view_of

import quire.kernels.recurrent.native  # noqa: F401  (registers the ops)
from quire.kernels import registry
from quire.kernels.output_gate import gate_rows, scale_heads
from quire.kernels.recurrent import causal_conv, gated_conv
from quire.kernels.recurrent.mamba import group_norm, mamba_inputs, mamba_scan
from quire.kernels.registry import Backend

BACKENDS = registry.backends("mamba_scan")


def inputs_of(sizes: Sizes, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return what `mamba_scan` reads: C and B, x, decays and steps, the skip."""
    rng = generator()
    xbc = torch.randn(tokens, sizes.channels, generator=rng).to(dtype)
    dt, width = torch.randn(tokens, sizes.v_heads, generator=rng).to(dtype), sizes.v_heads * sizes.values
    rate, bias, skip = torch.rand(3, sizes.v_heads, generator=rng)
    cb, gates = mamba_inputs(xbc, dt, -2.0 * rate, bias, sizes.k_heads, sizes.keys)
    return cb, xbc[:, :width], gates, skip


def oracle(
    cb: torch.Tensor, x: torch.Tensor, gates: torch.Tensor, skip: torch.Tensor, sizes: Sizes
) -> torch.Tensor:
    """The scan over one sequence, in fp64."""
    state = torch.zeros(sizes.v_heads, sizes.keys, sizes.values, dtype=torch.float64)
    rows = []
    for pair, value, (decay, step) in zip(cb.double(), x.double(), gates.double(), strict=True):
        c, b = pair.repeat_interleave(sizes.v_heads // sizes.k_heads, dim=1)
        of_heads = value.view(sizes.v_heads, -1)
        added = torch.einsum("hk,hv->hkv", b, of_heads * step[:, None])
        state = state * decay[:, None, None] + added
        y = torch.einsum("hkv,hk->hv", state, c) + of_heads * skip.double()[:, None]
        rows.append(y.flatten())
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_scan_against_fp64(sizes: Sizes, dtype: torch.dtype) -> None:
    cb, x, gates, skip = inputs_of(sizes, 40, dtype)
    y = mamba_scan(cb, x, gates, skip, view_of(sizes), batch_of((40,), (3,), fresh=True))
    assert_close("gated_delta_rule", y, oracle(cb, x, gates, skip, sizes))


@each("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_all_backends_give_the_same_bits(sizes: Sizes, dtype: torch.dtype, backend: Backend) -> None:
    cb, x, gates, skip = inputs_of(sizes, sum(LENGTHS), dtype)
    views = view_of(sizes), view_of(sizes)
    saves = ((0, 1, 7), (2, 5, 8), (2, 17, 9), (4, 16, 10))
    batch = batch_of(LENGTHS, (4, 1, 0, 6, 2), fresh=True, saves=saves)
    for count in (1, 2):
        with threads(count):
            ours = mamba_scan.on(backend)(cb, x, gates, skip, views[0], batch)
        assert_same_bits(ours, mamba_scan(cb, x, gates, skip, views[1], batch), "outputs")
        assert_same_bits(views[0].state, views[1].state, "states")


@each("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [1, 2, 7, 16])
def test_chunks_are_the_whole_prompt(chunk: int, dtype: torch.dtype, backend: Backend) -> None:
    """Outputs, states and pasts: in chunks next to another sequence, and from a checkpoint, as in one step alone."""
    sizes, length, rng = SIZES[0], 37, generator(1)
    scan, conv = mamba_scan.on(backend), gated_conv.on(backend)
    cb, x, gates, skip = inputs_of(sizes, length, dtype)
    fused = torch.randn(length, 3 * sizes.channels, generator=rng).to(dtype)
    weight, bias = (
        torch.randn(KERNEL, sizes.channels, generator=rng),
        torch.randn(sizes.channels, generator=rng),
    )
    whole, parts = view_of(sizes), view_of(sizes)
    cut = batch_of((length,), (3,), fresh=True, saves=((0, 16, 5),))
    expected = scan(cb, x, gates, skip, whole, cut), conv(fused, weight, whole, cut, bias)
    for start in range(0, length, chunk):
        rows = slice(start, min(start + chunk, length))
        size = rows.stop - rows.start
        batch = batch_of((size, size), (3, 9), fresh=start == 0)
        twice = [torch.cat((part[rows], part[rows])) for part in (cb, x, gates, fused)]
        y = scan(*twice[:3], skip, parts, batch)
        assert_same_bits(y, torch.cat((expected[0][rows],) * 2), f"scan from token {start}")
        z = conv(twice[3], weight, parts, batch, bias)
        assert_same_bits(z, torch.cat((expected[1][rows],) * 2), f"convolution from token {start}")
    for slot in (3, 9):
        assert_same_bits(parts.state[slot], whole.state[3], "state")
        assert_same_bits(parts.past[slot], whole.past[3], "past")
    rest, batch = slice(16, length), batch_of((length - 16,), (5,), fresh=False)
    y = scan(cb[rest], x[rest], gates[rest], skip, whole, batch)
    assert_same_bits(y, expected[0][rest], "scan from a checkpoint")
    assert_same_bits(
        conv(fused[rest], weight, whole, batch, bias), expected[1][rest], "conv. from a checkpoint"
    )


@each("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 2, 3, 30])
def test_convolutions_with_a_bias_against_fp64(length: int, dtype: torch.dtype, backend: Backend) -> None:
    sizes, rng = SIZES[2], generator()
    fused = torch.randn(length, 3 * sizes.channels + 5, generator=rng).to(dtype)[:, :-5]
    weight, bias = (
        torch.randn(KERNEL, sizes.channels, generator=rng),
        torch.randn(sizes.channels, generator=rng),
    )
    batch = batch_of((length,), (1,), fresh=True)
    b, c, x = fused.chunk(3, dim=1)

    def convolved(x: torch.Tensor) -> torch.Tensor:
        rows = torch.cat((torch.zeros(KERNEL - 1, sizes.channels), x.double()))
        return sum((weight[j].double() * rows[j : j + length] for j in range(KERNEL)), bias.double())

    total = convolved(x)
    y = causal_conv.on(backend)(x, weight, view_of(sizes), batch, bias)
    assert_close("gated", y, total * torch.sigmoid(total))
    y = gated_conv.on(backend)(fused, weight, view_of(sizes), batch, bias)
    assert_close("gated", y, c.double() * convolved(b.double() * x.double()))


@each("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_inputs_against_fp64(sizes: Sizes, dtype: torch.dtype, backend: Backend) -> None:
    rng, scale, limits = generator(), 0.7, (0.05, 3.0)
    fused = (torch.randn(9, sizes.channels + sizes.v_heads, generator=rng) * 5).to(dtype)
    xbc, dt = fused.split((sizes.channels, sizes.v_heads), dim=1)
    rate, bias = -torch.rand(sizes.v_heads, generator=rng) * 8, torch.randn(sizes.v_heads, generator=rng)
    cb, gates = mamba_inputs.on(backend)(xbc, dt, rate, bias, sizes.k_heads, sizes.keys, scale, limits)
    b, c = (
        xbc[:, sizes.v_heads * sizes.values :].float().unflatten(1, (2, sizes.k_heads, sizes.keys)).unbind(1)
    )
    assert torch.equal(cb, torch.stack((c, b), dim=1))
    step = torch.nn.functional.softplus(dt.double() * scale + bias.double()).clamp(*limits)
    assert_close("pointwise", gates, torch.stack(((rate.double() * step).exp(), step), dim=1))


@each("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["none", "gate_first", "norm_first"])
@pytest.mark.parametrize("size", [8, 37, 128])
def test_group_norm_against_fp64(size: int, form: str, dtype: torch.dtype, backend: Backend) -> None:
    rng = generator()
    x, weight = torch.randn(7, 3 * size, generator=rng).to(dtype), torch.randn(3 * size, generator=rng)
    z = torch.randn(7, 3 * size + 4, generator=rng).to(dtype)[:, 2 : 2 + 3 * size]
    gate = z.double() * 0.8 * (z.double() * 0.8).sigmoid()

    def normed(rows: torch.Tensor) -> torch.Tensor:
        groups = rows.unflatten(1, (3, size))
        return (groups / (groups.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()).flatten(1) * weight.double()

    expected = {
        "none": x.double() * gate,
        "gate_first": normed(x.double() * gate),
        "norm_first": normed(x.double()) * gate,
    }[form]
    y = group_norm.on(backend)(
        x, z, None if form == "none" else weight, 3, 1e-6, gate_first=form == "gate_first", scale=0.8
    )
    assert_close("gated", y, expected)


@each("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 37])
def test_gates_of_heads_against_fp64(size: int, dtype: torch.dtype, backend: Backend) -> None:
    rng = generator()
    x, gate = (
        torch.randn(7, 3 * size, generator=rng).to(dtype),
        torch.randn(7, 5, generator=rng).to(dtype)[:, 1:4],
    )
    spread = gate.double().repeat_interleave(size, dim=1)
    assert_close("gated", gate_rows.on(backend)(x, gate), x.double() * spread.sigmoid())
    assert_close("gated", scale_heads.on(backend)(x, gate), x.double() * spread)
