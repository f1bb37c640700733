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
from quire.kernels.linear.native import STEP, TYPES, format_words
from quire.kernels.pointwise import GATES, ActivationKind, gated, sigmoid
from quire.kernels.quantized_rows import row_stride
from quire.kernels.registry import NATIVE_LEVELS, native, op
from quire.kernels.threads import num_native_threads
from quire.kernels.workspace import address, empty
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


SCORINGS = {"softmax": 0, "sigmoid": 1, "softmax_after_topk": 2}


@route.native(NATIVE_LEVELS)
def native_route(
    isa: str, router_logits: Tensor, spec: MoeSpec, correction: Tensor | None
) -> tuple[Tensor, Tensor]:
    assert router_logits.is_contiguous()
    num_tokens = router_logits.shape[0]
    weights = empty(max(num_tokens, 1), spec.top_k, dtype=torch.float32)[:num_tokens]
    ids = empty(max(num_tokens, 1), spec.top_k, dtype=torch.int64)[:num_tokens]
    native.route(
        num_native_threads(), router_logits.data_ptr(), address(correction), SCORINGS[spec.scoring], num_tokens,
        spec.num_experts, spec.top_k, spec.num_groups, spec.topk_groups, spec.group_score == "top2_sum",
        spec.normalize_topk, spec.routed_scale, weights.data_ptr(), ids.data_ptr(),
    )  # fmt: skip
    return weights, ids


@experts.native(NATIVE_LEVELS)
def native_experts(isa: str, x: Tensor, weights: Tensor, expert_ids: Tensor, stack: ExpertStack) -> Tensor:
    up, down = stack.gate_up[0], stack.down[0]
    if any(not m.format.quantized and m.in_features % STEP[x.dtype] for m in (up, down)):
        return experts(x, weights, expert_ids, stack)  # the kernels read whole pairs
    if stack.addresses is None:
        stack.addresses = (_addresses(stack.gate_up), _addresses(stack.down))
    num_tokens, top_k = expert_ids.shape
    y = empty(max(num_tokens, 1), x.shape[1], dtype=x.dtype)[:num_tokens]
    shape = (num_tokens, x.shape[1], down.in_features, len(stack.gate_up), top_k, _words(up), _words(down))
    scratch = empty(max(native.experts_scratch_bytes(TYPES[x.dtype], *shape), 1), dtype=torch.uint8)
    native.experts(
        num_native_threads(), isa, TYPES[x.dtype], x.data_ptr(), x.stride(0), weights.data_ptr(),
        expert_ids.data_ptr(), stack.addresses[0].buffer_info()[0], stack.addresses[1].buffer_info()[0],
        GATES[stack.activation], y.data_ptr(), scratch.data_ptr(), *shape,
    )  # fmt: skip
    return y


def _words(packed: PackedLinear) -> tuple[int, int, bool, int]:
    """(bits, group, has_offset, bytes from row to row of its int8 rows); zeros where it is not quantized."""
    if not packed.format.quantized:
        return 0, 0, False, 0
    return *format_words(packed.format), row_stride(packed.in_features, packed.format.group)


def _addresses(matrices: Sequence[PackedLinear]) -> array[int]:
    """Return four per expert: of the weights, the bias, the scales and the offsets; 0 for none."""
    words = array("q")
    for m in matrices:
        words.extend([address(part) for part in (m.data, m.bias, m.scale, m.offset)])
    return words
