"""Ops of recurrent layers: the gated delta rule, alike per channel (`.channel_delta`), Mamba-2's scan (`.mamba`).

The delta rule (Yang et al. 2024, arXiv:2412.06464) as Qwen3-Next and Qwen3.5 use it:

    x ── projections ──> q k v ── causal_conv ──> q k v ── delta_inputs ──> q̂ k̂, decay, β ── gated_delta_rule ──> y
                         z, a, b                                                              gated_norm(y, z) ──> o

The contract of the rule is its recurrence, one token after the other in fp32, with a fixed order of additions over the
channels of a key. So chunks of any length, any batch and single tokens give the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.norm import rms_norm
from quire.kernels.pointwise import sigmoid
from quire.kernels.registry import op
from quire.kernels.state_pool import StateBatch, StateView

CHAINS = 4  # key channel i is added in chain i mod 4
# Epsilon of the l2 norm of q and k.
NORM_EPS = 1e-6


@op("causal_conv")
def causal_conv(
    x: Tensor, weight: Tensor, view: StateView, batch: StateBatch, bias: Tensor | None = None
) -> Tensor:
    """``silu(Σ_j weight[j] · x[t − kernel + 1 + j] + bias)``: each channel by itself, over the tokens of its sequence.

    ``x [num_tokens, channels]`` → the same shape and dtype; ``weight [kernel, channels]`` fp32, oldest token first;
    ``bias [channels]`` fp32. The rows before a chunk are ``view.past``, zeros where the sequence is fresh; afterwards
    it holds the chunk's last ones. Products and sums in fp32 with j ascending, rounded once.
    """
    total = _convolve(x.float(), weight, view, batch, bias)
    return (sigmoid(total) * total).to(x.dtype)


@op("gated_conv")
def gated_conv(
    rows: Tensor, weight: Tensor, view: StateView, batch: StateBatch, bias: Tensor | None = None
) -> Tensor:
    """``c · (Σ_j weight[j] · (b · x)[t − kernel + 1 + j] + bias)``, the short convolution of LFM2.

    ``rows [num_tokens, 3 · channels]`` are b, c and x → ``[num_tokens, channels]``. All else is as in `causal_conv`;
    the products ``b · x`` are fp32, and the past holds them.
    """
    b, c, x = rows.float().chunk(3, dim=1)
    return (c * _convolve(b * x, weight, view, batch, bias)).to(rows.dtype)


def _convolve(x: Tensor, weight: Tensor, view: StateView, batch: StateBatch, bias: Tensor | None) -> Tensor:
    kernel, y = weight.shape[0], torch.empty_like(x)
    for begin, end, slot, fresh, saves in chunks_of(batch):
        past = torch.zeros_like(view.past[slot]) if fresh else view.past[slot]
        rows = torch.cat((past, x[begin:end]))  # [kernel − 1 + tokens, channels]
        total = weight[0] * rows[: end - begin]
        for j in range(1, kernel):
            total = total + weight[j] * rows[j : j + end - begin]
        y[begin:end] = total if bias is None else total + bias
        for count, target in (*saves, (end - begin, slot)):
            view.past[target] = rows[count : count + kernel - 1]
    return y


@op("delta_inputs")
def delta_inputs(
    qkv: Tensor, a: Tensor, b: Tensor, rate: Tensor, dt_bias: Tensor, num_k_heads: int, k_head_dim: int
) -> tuple[Tensor, Tensor]:
    """What the rule reads of each token beside its values.

    Returns fp32 ``qk [num_tokens, 2, num_k_heads, k_head_dim]``, q / (‖q‖ · √k_head_dim) and k / ‖k‖ of the first
    columns of ``qkv``, and ``gates [num_tokens, 2, num_v_heads]``: the decay ``exp(rate · softplus(a + dt_bias))`` and
    ``β = σ(b)``. ``a, b [num_tokens, num_v_heads]`` in the model's dtype; ``rate`` (−exp(A_log)), ``dt_bias
    [num_v_heads]`` fp32.
    """
    width = 2 * num_k_heads * k_head_dim
    qk = torch.unflatten(qkv[:, :width].float(), 1, (2, num_k_heads, k_head_dim))
    qk = qk * torch.rsqrt((qk * qk).sum(-1, keepdim=True) + NORM_EPS)
    qk[:, 0] *= k_head_dim**-0.5
    return qk, torch.stack((torch.exp(rate * softplus(a.float() + dt_bias)), sigmoid(b.float())), dim=1)


@op("gated_delta_rule")
def gated_delta_rule(qk: Tensor, v: Tensor, gates: Tensor, view: StateView, batch: StateBatch) -> Tensor:
    """The recurrence of every value head: ``S ← decay · S``, ``S ← S + k ⊗ β (v − Sᵀ k)``, ``y = Sᵀ q``.

    ``qk`` and ``gates`` of `delta_inputs`; ``v [num_tokens, num_v_heads · v_head_dim]`` → the same shape and dtype.
    Value head h reads key head ``h // (num_v_heads / num_k_heads)``. S is ``view.state``; zeros where a sequence is
    fresh.

    Bits: every product and sum is rounded to fp32; sums over the key's channels are four chains (channel i in chain
    i mod 4, ascending), added as (0 + 1) + (2 + 3). All backends give these bits.
    """
    heads, _, values = view.state.shape[1:]
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    v = torch.unflatten(v.float(), 1, (heads, values))
    qk = qk.repeat_interleave(heads // qk.shape[2], dim=2).unsqueeze(-1)  # [num_tokens, 2, heads, keys, 1]
    for begin, end, slot, fresh, saves in chunks_of(batch):
        state = torch.zeros_like(view.state[slot]) if fresh else view.state[slot].clone()
        targets = [*saves, (end - begin, slot)]
        for token in range(begin, end):
            (q, k), (decay, beta) = qk[token], gates[token].unsqueeze(-1)
            state = state * decay.unsqueeze(-1)
            delta = (v[token] - over_keys(state * k)) * beta
            state = state + k * delta.unsqueeze(1)
            y[token] = over_keys(state * q).flatten().to(y.dtype)
            for _, target in [entry for entry in targets if entry[0] == token + 1 - begin]:
                view.state[target] = state
    return y


@op("gated_norm")
def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float, *, is_plain: bool = False) -> Tensor:
    """``rms_norm(x) · silu(z)`` of each head, rounded once; ``is_plain``: ``rms_norm(x) · σ(z)``.

    ``x, z [num_tokens, num_heads · size]``, ``weight [size]`` fp32 → the same shape and dtype, contiguous.
    """
    heads = torch.unflatten(x, 1, (-1, weight.shape[0]))
    gate = z.float()
    factor = sigmoid(gate) if is_plain else sigmoid(gate) * gate
    return (rms_norm(heads.float(), weight, eps).flatten(1) * factor).to(x.dtype)


def softplus(x: Tensor) -> Tensor:
    """``log(1 + exp(x))``. The sum in fp64, as in the native kernels: in fp32 it loses what a small step has."""
    return torch.where(x > 20.0, x, torch.log(1.0 + torch.exp(x.clamp(max=20.0)).double()).float())


def over_keys(products: Tensor) -> Tensor:
    """``[heads, keys, values]`` → ``[heads, values]``, added in the order of the contract."""
    steps = torch.unflatten(products, 1, (-1, CHAINS)).unbind(1)
    chains = torch.zeros_like(steps[0])
    for step in steps:
        chains = chains + step
    return (chains[:, 0] + chains[:, 1]) + (chains[:, 2] + chains[:, 3])


def chunks_of(batch: StateBatch) -> list[tuple[int, int, int, bool, list[tuple[int, int]]]]:
    """Return (first token, end, slot, fresh, [(tokens, slot) to save]) of each sequence."""
    saves: list[list[tuple[int, int]]] = [[] for _ in range(batch.num_seqs)]
    for sequence, count, slot in batch.saves.tolist():
        saves[sequence].append((count, slot))
    bounds = batch.cu_seqlens.tolist()
    rows = zip(bounds[:-1], bounds[1:], batch.slots.tolist(), batch.fresh.tolist(), saves, strict=True)
    return [(begin, end, slot, bool(fresh), own) for begin, end, slot, fresh, own in rows]
