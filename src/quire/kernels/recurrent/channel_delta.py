"""Ops of the delta rule with a decay per channel of the key (Kimi Team 2025, arXiv:2510.26692): Kimi Linear and Ling 3.

    x ── projections ──> q k v ── causal_conv ──> q k v ── channel_inputs ──> q̂ k̂, decays, β ── channel_delta_rule ──> y
                         f, z, b                                                gated_norm(y, z, plain sigmoid) ──> o

The contract is the one of `gated_delta_rule`, with ``decay`` a vector over the key's channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.pointwise import sigmoid
from quire.kernels.recurrent import NORM_EPS, chunks_of, over_keys, softplus
from quire.kernels.registry import op
from quire.kernels.state_pool import StateBatch, StateView


@op("channel_inputs")
def channel_inputs(
    qkv: Tensor, f: Tensor, b: Tensor, rate: Tensor, dt_bias: Tensor, k_head_dim: int, floor: float | None
) -> tuple[Tensor, Tensor]:
    """What the rule reads of each token beside its values.

    ``f [num_tokens, heads · k_head_dim]`` and ``b [num_tokens, heads]`` in the model's dtype; ``rate [heads]``
    (−exp(A_log)) and ``dt_bias [heads · k_head_dim]`` fp32. Returns fp32 ``qkd [num_tokens, 3, heads, k_head_dim]``: q
    and k as `delta_inputs` has them, and the decays ``exp(rate · softplus(f + dt_bias))``, or with a ``floor``
    ``exp(floor · σ(−rate · (f + dt_bias)))``; and ``beta [num_tokens, heads]``, ``σ(b)``.
    """
    heads = rate.shape[0]
    qk = torch.unflatten(qkv[:, : 2 * heads * k_head_dim].float(), 1, (2, heads, k_head_dim))
    qk = qk * torch.rsqrt((qk * qk).sum(-1, keepdim=True) + NORM_EPS)
    qk[:, 0] *= k_head_dim**-0.5
    inner, rates = torch.unflatten(f.float() + dt_bias, 1, (heads, k_head_dim)), rate.unsqueeze(1)
    log_decay = rates * softplus(inner) if floor is None else floor * sigmoid(-rates * inner)
    return torch.cat((qk, torch.exp(log_decay).unsqueeze(1)), dim=1), sigmoid(b.float())


@op("channel_delta_rule")
def channel_delta_rule(qkd: Tensor, v: Tensor, beta: Tensor, view: StateView, batch: StateBatch) -> Tensor:
    """The recurrence of every head: ``S ← decays ⊙ S``, ``S ← S + k ⊗ β (v − Sᵀ k)``, ``y = Sᵀ q``.

    ``qkd`` and ``beta`` of `channel_inputs`; ``v [num_tokens, heads · v_head_dim]`` → the same shape and dtype. S is
    ``view.state``; zeros where a sequence is fresh. Bits: as of `gated_delta_rule`, with a decay for each row of S.
    """
    heads, _, values = view.state.shape[1:]
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    v = torch.unflatten(v.float(), 1, (heads, values))
    rows = qkd.unsqueeze(-1)  # [num_tokens, 3, heads, keys, 1]
    for begin, end, slot, fresh, saves in chunks_of(batch):
        state = torch.zeros_like(view.state[slot]) if fresh else view.state[slot].clone()
        targets = [*saves, (end - begin, slot)]
        for token in range(begin, end):
            q, k, decays = rows[token]
            state = state * decays
            delta = (v[token] - over_keys(state * k)) * beta[token].unsqueeze(-1)
            state = state + k * delta.unsqueeze(1)
            y[token] = over_keys(state * q).flatten().to(y.dtype)
            for _, target in [entry for entry in targets if entry[0] == token + 1 - begin]:
                view.state[target] = state
    return y
