"""Ops of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060), §6: the scan of its state space with scalar decay per head.

    x ── projections ──> x B C ── causal_conv ──> x B C ── mamba_inputs ──> C B, decay, step ── mamba_scan ──> y
                         z, dt                                                     group_norm(y, z) ──> o

The contract of the scan is its recurrence, as of the delta rule: B and C lie as k and q do there, and the heads that
share them are value heads of one key head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.kernels.norm import rms_norm
from quire.kernels.pointwise import sigmoid
from quire.kernels.recurrent import chunks_of, over_keys, softplus
from quire.kernels.registry import op
from quire.kernels.state_pool import StateBatch, StateView


@op("mamba_inputs")
def mamba_inputs(
    xbc: Tensor, dt: Tensor, rate: Tensor, dt_bias: Tensor, groups: int, state_size: int, scale: float = 1.0,
    limits: tuple[float, float] = (0.0, math.inf),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What the scan reads of each token beside x.

    ``xbc [num_tokens, heads · head_dim + 2 · groups · state_size]`` are x, B and C behind the convolution, ``dt
    [num_tokens, heads]`` in the model's dtype. Returns fp32 ``cb [num_tokens, 2, groups, state_size]``, C and B, and
    ``gates [num_tokens, 2, heads]``: the decay ``exp(rate · step)`` and the step, which is ``softplus(scale · dt +
    dt_bias)`` within ``limits``. ``rate`` (−exp(A_log)) and ``dt_bias [heads]`` are fp32.
    """
    width = 2 * groups * state_size
    bc = torch.unflatten(xbc[:, -width:].float(), 1, (2, groups, state_size))
    step = softplus(dt.float() * scale + dt_bias).clamp(*limits)
    return bc.flip(1), torch.stack((torch.exp(rate * step), step), dim=1)


@op("mamba_scan")
def mamba_scan(
    cb: Tensor, x: Tensor, gates: Tensor, skip: Tensor, view: StateView, batch: StateBatch
) -> Tensor:
    """The recurrence of every head: ``S ← decay · S + B ⊗ step · x``, ``y = Sᵀ C + skip · x``.

    ``cb`` and ``gates`` of `mamba_inputs`; ``x [num_tokens, heads · head_dim]`` → the same shape and dtype; ``skip
    [heads]`` fp32. S ``[heads, state_size, head_dim]`` is ``view.state``; zeros where a sequence is fresh.

    Bits: every product and sum is rounded to fp32; the sum over the state's channels is as in `gated_delta_rule`. All
    backends give these bits.
    """
    heads, _, size = view.state.shape[1:]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x = torch.unflatten(x.float(), 1, (heads, size))
    cb = cb.repeat_interleave(heads // cb.shape[2], dim=2).unsqueeze(
        -1
    )  # [num_tokens, 2, heads, channels, 1]
    for begin, end, slot, fresh, saves in chunks_of(batch):
        state = torch.zeros_like(view.state[slot]) if fresh else view.state[slot].clone()
        targets = [*saves, (end - begin, slot)]
        for token in range(begin, end):
            (c, b), (decay, step) = cb[token], gates[token].unsqueeze(-1)
            state = state * decay.unsqueeze(-1) + b * (x[token] * step).unsqueeze(1)
            out = over_keys(state * c) + x[token] * skip.unsqueeze(-1)
            y[token] = out.flatten().to(y.dtype)
            for _, target in [entry for entry in targets if entry[0] == token + 1 - begin]:
                view.state[target] = state
    return y


@op("group_norm")
def group_norm(
    x: Tensor, z: Tensor, weight: Tensor | None, groups: int, eps: float, *, gate_first: bool = True, scale: float = 1.0
) -> Tensor:  # fmt: skip
    """``rms_norm(x · silu(scale · z))`` of each group of columns, or with the norm first; rounded once.

    ``x, z [num_tokens, width]``, ``weight [width]`` fp32 → the same shape and dtype, contiguous. Without a weight there
    is no norm.
    """
    gate = z.float() * scale
    gate = sigmoid(gate) * gate
    if weight is None:
        return (x.float() * gate).to(x.dtype)
    rows = x.float() * gate if gate_first else x.float()
    ones = torch.ones(x.shape[1] // groups)
    normed = rms_norm(torch.unflatten(rows, 1, (groups, -1)), ones, eps).flatten(1) * weight
    return (normed if gate_first else normed * gate).to(x.dtype)
