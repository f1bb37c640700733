"""Mixture of experts: which experts a token takes, and the product with them.

The references are exact: the scores of a token are a function of its own row; the rows of an expert go through its
matrices in tiles of 32 (`kernels.linear`), whatever the other rows; and the weighted sum runs over a token's experts
in the order of its own choice, never in the order of the experts that happen to be hit.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.kernels.linear import PackedLinear, linear
from quire.kernels.pointwise import ActivationKind, gated, sigmoid
from quire.kernels.registry import op
from quire.modelspec import MoeSpec

_TINY = 1e-20  # DeepSeek-V3 keeps the division of a sum of sigmoids safe with it


@dataclass(slots=True)
class ExpertStack:
    """The matrices of all experts of a block, equal in shape, format and backend.

    ``gate_up[e]`` is ``[2 · intermediate, hidden]``, ``down[e]`` is ``[hidden, intermediate]``.
    """

    gate_up: Sequence[PackedLinear]
    down: Sequence[PackedLinear]
    activation: ActivationKind
    # What a backend derived from the matrices at the first call; they stay where they are.
    addresses: tuple[array[int], array[int]] | None = field(default=None, repr=False)


@op("moe.route")
def route(router_logits: Tensor, spec: MoeSpec, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """fp32 ``[num_tokens, num_experts]`` → weights fp32 and expert ids int64, both ``[num_tokens, top_k]``.

    scores → (+ correction) → groups → top-k → weights. ``correction [num_experts]`` fp32 is added to the scores for the
    choice alone (DeepSeek-V3, arXiv:2412.19437).
    """
    if spec.scoring == "softmax_after_topk":
        chosen, ids = router_logits.topk(spec.top_k, dim=-1)
        return _softmax(chosen) * spec.routed_scale, ids
    scores = _softmax(router_logits) if spec.scoring == "softmax" else sigmoid(router_logits)
    choice = scores if correction is None else scores + correction
    if spec.num_groups > 1:
        choice = _best_groups(choice, spec)
    ids = choice.topk(spec.top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if spec.normalize_topk:
        total = weights[:, 0].clone()
        for j in range(1, spec.top_k):
            total += weights[:, j]
        weights = weights / (total + _TINY).unsqueeze(1)
    return weights * spec.routed_scale, ids


def _softmax(x: Tensor) -> Tensor:
    e = (x - x.amax(-1, keepdim=True)).exp_()
    return e / e.sum(-1, keepdim=True)


def _best_groups(choice: Tensor, spec: MoeSpec) -> Tensor:
    """Exclude the experts outside the ``topk_groups`` groups that score best."""
    grouped = torch.unflatten(choice, -1, (spec.num_groups, -1))
    if spec.group_score == "max":
        group_scores = grouped.amax(-1)
    else:
        best = grouped.topk(2, dim=-1).values
        group_scores = best[..., 0] + best[..., 1]
    kept = group_scores.topk(spec.topk_groups, dim=-1).indices
    outside = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, kept, False)
    return grouped.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(1)


@op("moe.experts")
def experts(x: Tensor, weights: Tensor, expert_ids: Tensor, stack: ExpertStack) -> Tensor:
    """``x [num_tokens, hidden]`` → ``Σ_j weights[:, j] · down(activation(gate_up(x)))``, of the same shape.

    The j-th product of a token is by expert ``expert_ids[:, j]``. The sum is fp32, in order of j, and rounded once to
    the dtype of x. One pass over the experts that are hit; rows are gathered by expert and put back by (token, choice).
    """
    num_tokens, top_k = expert_ids.shape
    order = expert_ids.view(-1).argsort(stable=True)  # (token, choice) pairs, expert by expert
    counts = torch.bincount(expert_ids.view(-1), minlength=len(stack.gate_up)).tolist()
    taken = x.new_empty(num_tokens * top_k, x.shape[1])
    start = 0
    for expert, count in enumerate(counts):
        if count:
            pairs = order[start : start + count]
            rows = linear(x.index_select(0, pairs // top_k), stack.gate_up[expert])
            taken[pairs] = linear(gated(rows, stack.activation), stack.down[expert])
            start += count
    parts = taken.view(num_tokens, top_k, x.shape[1]).float() * weights.unsqueeze(-1)
    total = parts[:, 0].clone()
    for j in range(1, top_k):
        total += parts[:, j]
    return total.to(x.dtype)
