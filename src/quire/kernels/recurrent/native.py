"""Native ops of recurrent layers (csrc/cpu/recurrent_kernel.cpp)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.kernels.recurrent import (
    CHAINS,
    NORM_EPS,
    causal_conv,
    delta_inputs,
    gated_conv,
    gated_delta_rule,
    gated_norm,
)
from quire.kernels.recurrent.channel_delta import channel_delta_rule, channel_inputs
from quire.kernels.recurrent.mamba import group_norm, mamba_inputs, mamba_scan
from quire.kernels.registry import native
from quire.kernels.state_pool import StateBatch, StateView
from quire.kernels.workspace import address, empty, native_call, rows_at


@causal_conv.native()
def native_causal_conv(
    isa: str, x: Tensor, weight: Tensor, view: StateView, batch: StateBatch, bias: Tensor | None = None
) -> Tensor:
    return _convolve(isa, x, (0, 0), weight, view, batch, bias)


@gated_conv.native()
def native_gated_conv(
    isa: str, rows: Tensor, weight: Tensor, view: StateView, batch: StateBatch, bias: Tensor | None = None
) -> Tensor:
    b, c, x = rows.chunk(3, dim=1)
    return _convolve(isa, x, (b.data_ptr(), c.data_ptr()), weight, view, batch, bias)


def _convolve(
    isa: str, x: Tensor, gates: tuple[int, int], weight: Tensor, view: StateView, batch: StateBatch,
    bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """``gates``: the addresses of b and c, whose rows lie as those of ``x``; 0: there are none."""
    (tokens, channels), kernel, past = x.shape, weight.shape[0], view.past
    assert past.shape[1:] == (kernel - 1, channels), (past.shape, weight.shape, x.shape)
    assert past.stride()[1:] == (channels, 1), past.stride()
    assert weight.is_contiguous()
    y = empty(tokens, channels, dtype=x.dtype)
    native.causal_conv(
        *native_call(isa, x), *rows_at(x), *gates, weight.data_ptr(), address(bias), past.data_ptr(), past.stride(0),
        y.data_ptr(), *batch.addresses(), tokens, channels, kernel,
    )  # fmt: skip
    return y


@delta_inputs.native()
def native_delta_inputs(
    isa: str,
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    rate: Tensor,
    dt_bias: Tensor,
    num_k_heads: int,
    k_head_dim: int,
) -> tuple[Tensor, Tensor]:
    tokens, v_heads = a.shape
    assert qkv.dtype == a.dtype == b.dtype, (qkv.dtype, a.dtype, b.dtype)
    assert rate.is_contiguous()
    assert dt_bias.is_contiguous()
    qk = empty(tokens, 2, num_k_heads, k_head_dim, dtype=torch.float32)
    gates = empty(tokens, 2, v_heads, dtype=torch.float32)
    native.delta_inputs(
        *native_call(isa, qkv), *rows_at(qkv), *rows_at(a), *rows_at(b), rate.data_ptr(), dt_bias.data_ptr(),
        qk.data_ptr(), gates.data_ptr(), tokens, num_k_heads, v_heads, k_head_dim, NORM_EPS,
    )  # fmt: skip
    return qk, gates


@channel_inputs.native()
def native_channel_inputs(
    isa: str, qkv: Tensor, f: Tensor, b: Tensor, rate: Tensor, dt_bias: Tensor, k_head_dim: int, floor: float | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tokens, heads = b.shape
    assert qkv.dtype == f.dtype == b.dtype, (qkv.dtype, f.dtype, b.dtype)
    assert f.shape[1] == dt_bias.shape[0] == heads * k_head_dim, (f.shape, dt_bias.shape, heads)
    assert rate.is_contiguous()
    assert dt_bias.is_contiguous()
    qkd = empty(tokens, 3, heads, k_head_dim, dtype=torch.float32)
    beta = empty(tokens, heads, dtype=torch.float32)
    native.channel_inputs(
        *native_call(isa, qkv), *rows_at(qkv), *rows_at(f), *rows_at(b), rate.data_ptr(), dt_bias.data_ptr(),
        qkd.data_ptr(), beta.data_ptr(), tokens, heads, k_head_dim, NORM_EPS, floor is not None, floor or 0.0,
    )  # fmt: skip
    return qkd, beta


@mamba_inputs.native()
def native_mamba_inputs(
    isa: str, xbc: Tensor, dt: Tensor, rate: Tensor, dt_bias: Tensor, groups: int, state_size: int, scale: float = 1.0,
    limits: tuple[float, float] = (0.0, math.inf),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tokens, heads = dt.shape
    assert xbc.dtype == dt.dtype, (xbc.dtype, dt.dtype)
    assert rate.is_contiguous()
    assert dt_bias.is_contiguous()
    cb = empty(tokens, 2, groups, state_size, dtype=torch.float32)
    gates = empty(tokens, 2, heads, dtype=torch.float32)
    width = xbc.shape[1] - 2 * groups * state_size
    native.mamba_inputs(
        *native_call(isa, xbc), *rows_at(xbc), *rows_at(dt), rate.data_ptr(), dt_bias.data_ptr(), cb.data_ptr(),
        gates.data_ptr(), tokens, groups, heads, state_size, width, scale, *limits,
    )  # fmt: skip
    return cb, gates


@gated_delta_rule.native()
def native_gated_delta_rule(
    isa: str, qk: Tensor, v: Tensor, gates: Tensor, view: StateView, batch: StateBatch
) -> Tensor:
    return _scan(isa, qk, v, gates, None, view, batch)


@channel_delta_rule.native()
def native_channel_delta_rule(
    isa: str, qkd: Tensor, v: Tensor, beta: Tensor, view: StateView, batch: StateBatch
) -> Tensor:
    return _scan(isa, qkd, v, beta, None, view, batch)


@mamba_scan.native()
def native_mamba_scan(
    isa: str, cb: Tensor, x: Tensor, gates: Tensor, skip: Tensor, view: StateView, batch: StateBatch
) -> Tensor:
    assert skip.is_contiguous()
    return _scan(isa, cb, x, gates, skip, view, batch)


def _scan(
    isa: str, qk: Tensor, v: Tensor, gates: Tensor, skip: Tensor | None, view: StateView, batch: StateBatch
) -> Tensor:
    """``qk`` with decays as its third part, or two parts and decays in ``gates``."""
    state = view.state
    heads, keys, values = state.shape[1:]
    assert qk.is_contiguous()
    assert gates.is_contiguous()
    assert keys % CHAINS == 0, keys
    assert qk.shape[3] == keys, (qk.shape, state.shape)
    assert v.shape[1] == heads * values, (v.shape, state.shape)
    assert state.stride()[1:] == (keys * values, values, 1), state.stride()
    y = empty(*v.shape, dtype=v.dtype)
    native.gated_delta_rule(
        *native_call(isa, v), qk.data_ptr(), gates.data_ptr(), address(skip), *rows_at(v), state.data_ptr(),
        state.stride(0), y.data_ptr(), *batch.addresses(), v.shape[0], qk.shape[2], heads, keys, values,
        qk.shape[1],
    )  # fmt: skip
    return y


@gated_norm.native()
def native_gated_norm(
    isa: str, x: Tensor, z: Tensor, weight: Tensor, eps: float, *, is_plain: bool = False
) -> Tensor:
    assert x.dtype == z.dtype, (x.dtype, z.dtype)
    assert x.shape == z.shape, (x.shape, z.shape)
    assert weight.is_contiguous()
    y, size = empty(*x.shape, dtype=x.dtype), weight.shape[0]
    native.gated_norm(
        *native_call(isa, x), *rows_at(x), *rows_at(z), weight.data_ptr(), y.data_ptr(), x.shape[0], x.shape[1] // size,
        size, eps, is_plain,
    )  # fmt: skip
    return y


@group_norm.native()
def native_group_norm(
    isa: str, x: Tensor, z: Tensor, weight: Tensor | None, groups: int, eps: float, *, gate_first: bool = True,
    scale: float = 1.0,
) -> Tensor:  # fmt: skip
    assert x.dtype == z.dtype, (x.dtype, z.dtype)
    assert x.shape == z.shape, (x.shape, z.shape)
    assert weight is None or weight.is_contiguous()
    y = empty(*x.shape, dtype=x.dtype)
    native.group_norm(
        *native_call(isa, x), *rows_at(x), *rows_at(z), address(weight), y.data_ptr(), x.shape[0], groups,
        x.shape[1] // groups, eps, scale, gate_first,
    )  # fmt: skip
    return y
