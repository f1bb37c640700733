"""The grid of each group with the least square error of the outputs (AWQ's search of clipping points, Lin et al. 2023).

With G the mean of xᵀx over a group's inputs, the mean square error of the group's part of an output is dᵀ G d, where d
is what rounding changes: errors of inputs that go together count together, which squares of single errors do not see.
What two groups do together is not looked at. For integers q of one clipping point (less their zero points) the best
scale is wᵀ G q / qᵀ G q, and its error follows from the same products: a clipping point costs one product with G.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.quantized_rows import SMALLEST
from quire.quant.stored import row_ranges
from quire_lab.quantize.grid import Grid, Rounded, levels
from quire_lab.quantize.rounding import stored_scale
from quire_lab.quantize.scheme import Scheme

# Clipping points that are tried, as shares of a group's whole range. Above 1 the outermost of few levels is not used.
SHARES = torch.linspace(1.0, 0.6, 9).tolist()
SHARES_OF_FEW = torch.linspace(2.0, 0.4, 17).tolist()


def group_grams(gram: Tensor, num_groups: int) -> Tensor:
    """``gram [in, in]``, the mean of xᵀx → each group's block of it, scaled to about 1, ``[groups, size, size]``."""
    size = len(gram) // num_groups
    tiles = torch.unflatten(torch.unflatten(gram, 1, (num_groups, size)), 0, (num_groups, size))
    blocks = torch.diagonal(tiles, dim1=0, dim2=2).permute(2, 0, 1).contiguous()
    return blocks / gram.diagonal().mean().clamp_min(SMALLEST)


def round_for_outputs(weight: Tensor, scheme: Scheme, grams: Tensor) -> Rounded:
    """Return the integers of ``weight [out, in]``; ``grams``: of the groups of ``scheme``, as `group_grams`."""
    fits = [_fit(weight[start:stop].float(), scheme, grams) for start, stop in row_ranges(*weight.shape)]
    q, scale, zero = (torch.cat(tensors) for tensors in zip(*fits, strict=True))
    return Rounded(scheme, q, Grid(scale, None if scheme.symmetric else zero))


def _fit(weight: Tensor, scheme: Scheme, grams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return integers, scales and zero points of some rows."""
    values = torch.unflatten(weight, 1, (len(grams), -1))
    low, high = values.amin(-1), values.amax(-1)
    if scheme.symmetric:
        # With its sign: whole, the largest weight becomes the lowest level, the one without a twin.
        whole = torch.where(-low >= high, low, high) / scheme.lowest
    else:
        low, high = low.clamp_max(0.0), high.clamp_min(0.0)
        whole = (high - low) / (scheme.highest - scheme.lowest)
    best, scales = torch.full_like(low, torch.inf), torch.zeros_like(low)
    zeros, numbers = torch.zeros_like(low), torch.zeros_like(values)
    for share in SHARES if scheme.bits >= 4 else SHARES_OF_FEW:
        scale = stored_scale(whole * share, zero_points=not scheme.symmetric)
        zero = torch.zeros_like(low)
        if not scheme.symmetric:
            inverse = torch.where(scale != 0.0, scale.reciprocal(), 0.0)
            zero = (scheme.lowest - low * share * inverse).round_().clamp_(scheme.lowest, scheme.highest)
        q = levels(values, scale, None if scheme.symmetric else zero, scheme) - zero.unsqueeze(-1)
        weighed = torch.bmm(q.transpose(0, 1), grams).transpose(0, 1)
        along, size = (weighed * values).sum(-1), (weighed * q).sum(-1)
        # No input of some groups is ever used: any scale has no error there.
        fitted = torch.where(size > SMALLEST, along / size, scale)
        fitted = stored_scale(fitted, zero_points=not scheme.symmetric)
        error = fitted * (fitted * size - 2.0 * along)
        better = error < best
        best, scales = torch.where(better, error, best), torch.where(better, fitted, scales)
        zeros, numbers = torch.where(better, zero, zeros), torch.where(better.unsqueeze(-1), q, numbers)
    return (numbers + zeros.unsqueeze(-1)).flatten(1).to(torch.int8), scales, zeros
