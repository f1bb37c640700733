"""Native routing and expert products (csrc/cpu/moe_route.cpp, moe_experts.cpp): one call each."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels import moe
from quire.kernels.linear import PackedLinear
from quire.kernels.linear.native import STEP, TYPES, format_words
from quire.kernels.moe import ExpertStack
from quire.kernels.pointwise import GATES
from quire.kernels.quantized_rows import row_stride
from quire.kernels.registry import NATIVE_LEVELS, native
from quire.kernels.threads import num_native_threads
from quire.kernels.workspace import address, empty
from quire.modelspec import MoeSpec

SCORINGS = {"softmax": 0, "sigmoid": 1, "softmax_after_topk": 2}


@moe.route.native(NATIVE_LEVELS)
def route(isa: str, router_logits: Tensor, spec: MoeSpec, correction: Tensor | None) -> tuple[Tensor, Tensor]:
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


@moe.experts.native(NATIVE_LEVELS)
def experts(isa: str, x: Tensor, weights: Tensor, expert_ids: Tensor, stack: ExpertStack) -> Tensor:
    up, down = stack.gate_up[0], stack.down[0]
    if any(not m.format.quantized and m.in_features % STEP[x.dtype] for m in (up, down)):
        return moe.experts(x, weights, expert_ids, stack)  # the kernels read whole pairs
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
