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

from quire.kernels.activation import ALL_KINDS, activated
from quire.kernels.collective import Group
from quire.kernels.collective.native import SharedMemoryGroup
from quire.kernels.linear import PackedLinear, linear
from quire.kernels.linear.native import STEP, TYPES, format_words
from quire.kernels.pointwise import ActivationKind, sigmoid
from quire.kernels.quantized_rows import row_stride
from quire.kernels.registry import NATIVE_LEVELS, native, op
from quire.kernels.threads import num_native_threads
from quire.kernels.workspace import address, empty
from quire.modelspec import MoeSpec

_TINY = 1e-20  # keeps the division by a sum of sigmoids safe (DeepSeek-V3)


class ExpertPlaces:
    """Where the experts of a layer lie, on the ranks of ``group``, which have the same rows of the residual stream.

    Slots are numbered rank by rank, ``per_rank`` on each. An expert may have several, which take its rows in turn. The
    tensors stay where they are: a recorded step reads them.
    """

    def __init__(self, group: Group, num_experts: int, slots: Sequence[int]) -> None:
        """``slots``: the expert in each slot of all ranks; every expert has one at least."""
        self.group = group
        self.per_rank, rest = divmod(len(slots), group.size)
        assert rest == 0, (len(slots), group.size)
        width = 2 + len(slots) - num_experts  # an expert's slots at most, and their number
        self.table = torch.zeros(num_experts, width, dtype=torch.int64)
        self.loads = torch.zeros(num_experts, dtype=torch.int64)  # rows that chose each expert so far
        self.slots: tuple[int, ...] = ()
        self.place(slots)

    def place(self, slots: Sequence[int]) -> None:
        """The matrices have been moved: slot s now has the expert ``slots[s]``."""
        self.slots = tuple(slots)
        self.table.zero_()
        for slot, expert in enumerate(slots):
            self.table[expert, 0] += 1
            self.table[expert, int(self.table[expert, 0])] = slot
        assert bool((self.table[:, 0] > 0).all()), slots

    def slots_of(self, ids: Tensor) -> Tensor:
        """Return the slot of each row of ``ids [rows]``, an expert's c-th row in its slot c mod their number."""
        order = ids.argsort(stable=True)
        counts = torch.bincount(ids, minlength=len(self.loads))
        self.loads += counts
        starts = counts.cumsum(0) - counts
        turn = torch.empty_like(ids)
        turn[order] = torch.arange(len(ids)) - starts[ids[order]]
        row = self.table[ids]
        return row.gather(1, (1 + turn % row[:, 0]).unsqueeze(1)).squeeze(1)


@dataclass(slots=True)
class ExpertStack:
    """The matrices of all experts of a block, or of this rank's slots, equal in shape, format and backend.

    ``gate_up[e]`` is ``[2 · intermediate, hidden]``, ``down[e]`` is ``[hidden, intermediate]``.
    """

    gate_up: Sequence[PackedLinear]
    down: Sequence[PackedLinear]
    activation: ActivationKind
    places: ExpertPlaces | None = None  # None: all experts are here, expert e in slot e
    # What a backend derived from the matrices at the first call; they stay where they are.
    addresses: tuple[array[int], array[int]] | None = field(default=None, repr=False)


@op("moe.route")
def route(
    router_logits: Tensor, spec: MoeSpec, correction: Tensor | None, factors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """fp32 ``[num_tokens, num_experts]`` → weights fp32 and expert ids int64, both ``[num_tokens, top_k]``.

    scores → (+ correction) → groups → top-k → weights. ``correction [num_experts]`` fp32 is added to the scores for the
    choice alone (DeepSeek-V3, arXiv:2412.19437); ``factors [num_experts]`` fp32 multiply the weights (Gemma 4).
    """
    if spec.scoring == "softmax_after_topk":
        chosen, ids = router_logits.topk(spec.top_k, dim=-1)
        return _times(_softmax(chosen) * spec.routed_scale, factors, ids), ids
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
    return _times(weights * spec.routed_scale, factors, ids), ids


def _times(weights: Tensor, factors: Tensor | None, ids: Tensor) -> Tensor:
    return weights if factors is None else weights * factors[ids]


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
    top_groups = group_scores.topk(spec.topk_groups, dim=-1).indices
    outside = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, top_groups, False)
    return grouped.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(1)


@op("moe.experts")
def experts(x: Tensor, weights: Tensor, expert_ids: Tensor, stack: ExpertStack) -> Tensor:
    """``x [num_tokens, hidden]`` → ``Σ_j weights[:, j] · down(activation(gate_up(x)))``, of the same shape.

    The j-th product of a token is by expert ``expert_ids[:, j]``. The sum is fp32, in order of j, and rounded once to
    the dtype of x. One pass over the experts that are hit; rows are gathered by expert and put back by (token, choice).

    With ``stack.places`` every rank has the same x and ids, multiplies with its own slots, and gets all products from
    the others: the sum is that of one process, on every rank.
    """
    num_tokens, top_k = expert_ids.shape
    places, slots, first = stack.places, expert_ids.view(-1), 0
    if places is not None:
        slots, first = places.slots_of(slots), places.group.index * places.per_rank
    order = slots.argsort(stable=True)  # (token, choice) pairs, slot by slot
    num_slots = len(stack.gate_up) if places is None else len(places.slots)
    starts = [0, *torch.bincount(slots, minlength=num_slots).cumsum(0).tolist()]
    out = x.new_empty(num_tokens * top_k, x.shape[1])  # in that order
    for index, matrix in enumerate(stack.gate_up):
        start, stop = starts[first + index], starts[first + index + 1]
        if start < stop:
            rows = linear(x.index_select(0, order[start:stop] // top_k), matrix)
            out[start:stop] = linear(activated(rows, stack.activation), stack.down[index])
    if places is not None:
        places.group.gather_parts(out, starts[:: places.per_rank])
    taken = torch.empty_like(out)
    taken[order] = out
    parts = taken.view(num_tokens, top_k, x.shape[1]).float() * weights.unsqueeze(-1)
    total = parts[:, 0].clone()
    for j in range(1, top_k):
        total += parts[:, j]
    return total.to(x.dtype)


SCORINGS = {"softmax": 0, "sigmoid": 1, "softmax_after_topk": 2}


@route.native(NATIVE_LEVELS)
def native_route(
    isa: str, router_logits: Tensor, spec: MoeSpec, correction: Tensor | None, factors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    assert router_logits.is_contiguous()
    num_tokens = router_logits.shape[0]
    weights = empty(max(num_tokens, 1), spec.top_k, dtype=torch.float32)[:num_tokens]
    ids = empty(max(num_tokens, 1), spec.top_k, dtype=torch.int64)[:num_tokens]
    native.route(
        num_native_threads(), router_logits.data_ptr(), address(correction), SCORINGS[spec.scoring], num_tokens,
        spec.num_experts, spec.top_k, spec.num_groups, spec.topk_groups, spec.group_score == "top2_sum",
        spec.normalize_topk, spec.routed_scale, weights.data_ptr(), ids.data_ptr(), address(factors),
    )  # fmt: skip
    return weights, ids


@experts.native(NATIVE_LEVELS)
def native_experts(isa: str, x: Tensor, weights: Tensor, expert_ids: Tensor, stack: ExpertStack) -> Tensor:
    up, down = stack.gate_up[0], stack.down[0]
    if any(not m.format.quantized and m.in_features % STEP[x.dtype] for m in (up, down)):
        return experts(x, weights, expert_ids, stack)  # the kernels read whole pairs
    places, words = stack.places, None
    if places is not None:
        if not isinstance(places.group, SharedMemoryGroup):
            return experts(x, weights, expert_ids, stack)
        table, loads = places.table, places.loads
        words = (places.group.channel, table.data_ptr(), table.shape[1], loads.data_ptr(), len(loads))
    if stack.addresses is None:
        stack.addresses = (_addresses(stack.gate_up), _addresses(stack.down))
    num_tokens, top_k = expert_ids.shape
    y = empty(max(num_tokens, 1), x.shape[1], dtype=x.dtype)[:num_tokens]
    num_slots = len(stack.gate_up) if places is None else len(places.slots)
    shape = (num_tokens, x.shape[1], down.in_features, num_slots, top_k, _words(up), _words(down), words)
    scratch = empty(max(native.experts_scratch_bytes(TYPES[x.dtype], *shape), 1), dtype=torch.uint8)
    native.experts(
        num_native_threads(), isa, TYPES[x.dtype], x.data_ptr(), x.stride(0), weights.data_ptr(),
        expert_ids.data_ptr(), stack.addresses[0].buffer_info()[0], stack.addresses[1].buffer_info()[0],
        ALL_KINDS[stack.activation], y.data_ptr(), scratch.data_ptr(), *shape,
    )  # fmt: skip
    return y


def _words(packed: PackedLinear) -> tuple[int, int, bool, int, int]:
    """(bits, group, has_offset, rotation, bytes from row to row of its int8 rows); zeros where it is not quantized."""
    format = packed.format
    if not format.quantized:
        return 0, 0, False, 0, 0
    return *format_words(format), format.rotation or 0, row_stride(packed.in_features, format.group)


def _addresses(matrices: Sequence[PackedLinear]) -> array[int]:
    """Return four per expert: of the weights, the bias, the scales and the offsets; 0 for none."""
    words = array("q")
    for m in matrices:
        words.extend([address(part) for part in (m.data, m.bias, m.scale, m.offset)])
    return words
