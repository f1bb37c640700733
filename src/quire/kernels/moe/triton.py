"""Experts on a GPU: (token, choice) pairs sorted by expert, two grouped products over tiles of one expert's rows.

Bytes at few tokens: the matrices of the experts that are hit, once. Nothing waits for the host: the grid has as many
tiles as the shapes allow, and superfluous tiles are empty. A token's experts are added in the order of its own choice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from quire.kernels import moe
from quire.kernels.block_sizes import Sizes, block_sizes
from quire.kernels.linear.packed import PackedLinear
from quire.kernels.linear.triton import quantize_rows_to_fp8
from quire.kernels.linear.triton_matmul import ExpertStrides, held, launch
from quire.kernels.moe import ExpertStack
from quire.kernels.pointwise.triton import gated
from quire.kernels.workspace import unit_stride

MANY = 64  # rows per expert; more take the tiles for many rows


@moe.experts.version("triton")
def experts(x: Tensor, weights: Tensor, expert_ids: Tensor, stack: ExpertStack) -> Tensor:
    many = expert_ids.numel() > MANY * len(stack.down)
    shape = f"{stack.down[0].format.kind}_k{x.shape[1]}"
    sizes = block_sizes("grouped_large" if many else "grouped_small", shape)
    return _experts(x, weights, expert_ids, stack, sizes)


@moe.experts.version("invariant")
def experts_invariant(x: Tensor, weights: Tensor, expert_ids: Tensor, stack: ExpertStack) -> Tensor:
    """The same with tiles of one shape: a token's bits do not depend on the tokens that share its experts."""
    return _experts(x, weights, expert_ids, stack, block_sizes("matmul_invariant", "all"))


def _experts(x: Tensor, weights: Tensor, expert_ids: Tensor, stack: ExpertStack, sizes: Sizes) -> Tensor:
    num_tokens, top_k = expert_ids.shape
    if num_tokens == 0:
        return torch.empty_like(x)
    chosen, order = torch.sort(expert_ids.reshape(-1), stable=True)
    tiles = cut_tiles(chosen, len(stack.down), sizes["rows"])
    pairs = chosen.numel()
    in_order = torch.arange(pairs, dtype=torch.int32, device=x.device)
    token_of = torch.div(order, top_k, rounding_mode="floor").to(torch.int32)
    hidden = _grouped(unit_stride(x), token_of, stack.gate_up, tiles, pairs, sizes)
    out = _grouped(gated(hidden, stack.activation), in_order, stack.down, tiles, pairs, sizes)
    taken = torch.empty_like(out)
    taken[order] = out
    parts = taken.view(num_tokens, top_k, -1).float() * weights.unsqueeze(-1)
    total = parts[:, 0].clone()
    for j in range(1, top_k):
        total += parts[:, j]
    return total.to(x.dtype)


def cut_tiles(chosen: Tensor, num_experts: int, rows: int) -> Tensor:
    """Cut the sorted ``chosen [pairs]`` into tiles of up to ``rows`` of one expert.

    Returns int32 ``[as many as there can be, 3]``: expert, first row, end row of the expert; empty ones come last.
    """
    device = chosen.device
    starts = torch.searchsorted(chosen, torch.arange(num_experts + 1, device=device, dtype=chosen.dtype))
    counts = starts[1:] - starts[:-1]
    tiles_of = torch.div(counts + rows - 1, rows, rounding_mode="floor")
    ends = tiles_of.cumsum(0)
    most = min(chosen.numel(), num_experts) + chosen.numel() // rows
    tile = torch.arange(most, device=device)
    expert = torch.searchsorted(ends, tile, right=True).clamp_max(num_experts - 1)
    first = starts[expert] + (tile - (ends[expert] - tiles_of[expert])) * rows
    end = torch.where(tile < ends[-1], starts[expert + 1], first)
    return torch.stack((expert, first, end), dim=1).to(torch.int32).contiguous()


def _grouped(
    x: Tensor, row_index: Tensor, matrices: Sequence[PackedLinear], tiles: Tensor, pairs: int, sizes: Sizes
) -> Tensor:
    """Row i is ``x[row_index[i]]`` times the matrix of its tile's expert: ``[pairs, out_features]``."""
    one = matrices[0]
    out = torch.empty(pairs, one.out_features, dtype=x.dtype, device=x.device)
    row_scale = None
    if one.format.kind == "fp8":
        rows = quantize_rows_to_fp8(x, one.format.rows)
        x, row_scale = rows.q, rows.scale
    how = held(one, sizes["inner"])
    steps = triton.cdiv(one.in_features, how.step)
    strides = strides_of(matrices)
    launch(x, row_index, one, out, tiles, pairs, how, sizes, steps, 1, strides, row_scale)
    return out


def strides_of(matrices: Sequence[PackedLinear]) -> ExpertStrides:
    """Elements from expert to expert: one number per tensor, as `linear.pack_many` lays them out."""

    def stride(name: str) -> int:
        first, second = getattr(matrices[0], name), getattr(matrices[min(1, len(matrices) - 1)], name)
        if first is None:
            return 0
        return int(second.data_ptr() - first.data_ptr()) // int(first.element_size())

    scales = stride("group_scale") if matrices[0].group_scale is not None else stride("offset")
    return ExpertStrides(stride("data"), scales, stride("scale"), stride("bias"))
