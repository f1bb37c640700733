"""Scales of GGUF's blocks: for each group those with the least square error, then rounded to what the block stores.

    Q8_0 Q5_0 Q4_0   w = d · q                        d fp16 for 32 inputs
    Q5_1 Q4_1        w = d · q + m                    d and m fp16 for 32 inputs
    IQ4_NL           w = d · table[q]                 d fp16 for 32 inputs
    Q5_K Q4_K        w = (d · scale) · q − d_min · min     d, d_min fp16 for 256 inputs, scale and min 6 bits for 32
    Q6_K             w = (d · scale) · q              d fp16 for 256 inputs, scale 8 bits for 16
    IQ4_XS           w = (d · scale) · table[q]       d fp16 for 256 inputs, scale 6 bits for 32

Scales may be negative, so that the lowest level, which has no twin, goes to the side of a group's largest weight. The
search is that of `quire_lab.quantize.rounding`: clipping points, each with the best scale for its integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.families.gguf_types import BLOCK_TYPES
from quire.kernels.quantized_rows import SMALLEST
from quire.quant.ggml_codebooks import IQ4_LEVELS
from quire.quant.rtn import DIVISORS
from quire.quant.stored import row_ranges
from quire_lab.quantize.grid import Grid, Nested, nearest
from quire_lab.quantize.scheme import Scheme

SCHEMES: Mapping[str, Scheme] = {
    "q8_0": Scheme(8, 32, block="q8_0"),
    "q5_0": Scheme(5, 32, block="q5_0"),
    "q4_0": Scheme(4, 32, block="q4_0"),
    "q5_1": Scheme(5, 32, symmetric=False, block="q5_1"),
    "q4_1": Scheme(4, 32, symmetric=False, block="q4_1"),
    "iq4_nl": Scheme(4, 32, block="iq4_nl"),
    "q5_k": Scheme(5, 32, symmetric=False, block="q5_k"),
    "q4_k": Scheme(4, 32, symmetric=False, block="q4_k"),
    "q6_k": Scheme(6, 16, block="q6_k"),
    "iq4_xs": Scheme(4, 32, block="iq4_xs"),
}
# The largest code of a scale within a block of 256 inputs.
_LARGEST_CODE = {"q5_k": 63, "q4_k": 63, "q6_k": 127, "iq4_xs": 31}
# Places of a group's largest weight, as a share of the outermost level.
_SHARES = tuple(divisor / DIVISORS[0] for divisor in DIVISORS)
# Of a group's range, what the levels span.
_SPANS = tuple(twentieths / 20 for twentieths in (20, 19, 18, 17, 16, 15, 21))


@dataclass(frozen=True, slots=True)
class _Groups:
    """``values [rows, groups, group]`` of some rows, and the ``weights [groups, group]`` of their square errors."""

    values: Tensor
    weights: Tensor
    scheme: Scheme
    table: Tensor | None

    def levels(self, scale: Tensor, offset: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the nearest integers of a grid, and the levels that they are, fp32."""
        inverse = torch.where(scale != 0.0, scale.reciprocal(), 0.0).unsqueeze(-1)
        values = self.values if offset is None else self.values - offset.unsqueeze(-1)
        q = nearest(values * inverse, self.table, self.scheme)
        return q, q if self.table is None else self.table[q.int()]


def fit_blocks(weight: Tensor, scheme: Scheme, importance: Tensor | None = None) -> Grid:
    """Return the grid of ``weight [out, in]`` in the blocks of ``scheme``; ``importance [in]`` weights errors."""
    assert scheme.block is not None
    table = torch.tensor(IQ4_LEVELS, dtype=torch.float32) if scheme.block.startswith("iq4") else None
    num_groups = scheme.num_groups(weight.shape[1])
    weights = torch.ones(weight.shape[1]) if importance is None else importance.float()
    weights = torch.unflatten(weights / weights.mean().clamp_min(SMALLEST), 0, (num_groups, -1))
    # An input that the text never used still has weights that another text may use.
    weights = weights.clamp_min(1e-4)
    parts = []
    for start, stop in row_ranges(*weight.shape):
        values = torch.unflatten(weight[start:stop].float(), 1, (num_groups, -1))
        parts.append(_fit(_Groups(values, weights, scheme, table)))
    return _joined(parts, table)


def _joined(parts: list[Grid], table: Tensor | None) -> Grid:
    def whole(tensors: list[Tensor | None]) -> Tensor | None:
        present = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(present) if present else None

    scale, offset = whole([p.scale for p in parts]), whole([p.offset for p in parts])
    nested = [p.nested for p in parts if p.nested is not None]
    joined = None
    if nested:
        d, codes = whole([n.d for n in nested]), whole([n.codes for n in nested])
        assert d is not None
        assert codes is not None
        joined = Nested(d, codes, whole([n.d_min for n in nested]), whole([n.mins for n in nested]))
    assert scale is not None
    return Grid(scale, offset=offset, table=table, nested=joined)


def _fit(groups: _Groups) -> Grid:
    name = groups.scheme.block
    assert name is not None
    nested = BLOCK_TYPES[name].held.scales == "nested"
    if groups.scheme.symmetric:
        scale = _search(groups)
        return _nested(groups, scale) if nested else Grid(scale.half().float())
    scale, offset = _search_with_offset(groups, below_zero=nested)
    if nested:
        return _nested_with_offset(groups, scale, offset)
    scale = scale.half().float()
    # The best offset for the integers that the stored scale gives.
    q, _ = groups.levels(scale, offset)
    total = groups.weights.sum(-1)
    offset = ((groups.values - q * scale.unsqueeze(-1)) * groups.weights).sum(-1) / total
    return Grid(scale, offset=offset.half().float())


def _search(groups: _Groups) -> Tensor:
    """Return the scale of each group, ``[rows, groups]``."""
    values, scheme = groups.values, groups.scheme
    low, high = values.amin(-1), values.amax(-1)
    extreme = torch.where(-low >= high, low, high)
    used = extreme.abs() > SMALLEST
    best, chosen = torch.zeros_like(extreme), torch.zeros_like(extreme)
    if scheme.bits == 8:
        return torch.where(used, extreme / -127.0, 0.0)
    ends = (scheme.lowest,) if groups.table is None else (IQ4_LEVELS[0], IQ4_LEVELS[-1])
    for end in ends:
        for share in _SHARES:
            _, levels = groups.levels(extreme / (end * share))
            weighted = levels * groups.weights
            along, size = (values * weighted).sum(-1), (levels * weighted).sum(-1)
            # What the best scale for these integers takes from the square error.
            gain = torch.where(size > 0.0, along.square() / size, 0.0)
            better = used & (gain > best)
            best, chosen = torch.where(better, gain, best), torch.where(better, along / size, chosen)
    return chosen


def _search_with_offset(groups: _Groups, *, below_zero: bool) -> tuple[Tensor, Tensor]:
    """Return scale and offset of each group; ``below_zero``: offsets are 0 or less."""
    values, weights, steps = groups.values, groups.weights, groups.scheme.highest
    low, high = values.amin(-1), values.amax(-1)
    if below_zero:
        low = low.clamp_max(0.0)
    used = (high - low) > SMALLEST
    total = weights.sum(-1)
    sum_x = (values * weights).sum(-1)
    best = torch.full_like(low, torch.inf)
    chosen, offsets = torch.zeros_like(low), low.clone()
    for span in _SPANS:
        first = (high - low) * (span / steps)
        q, _ = groups.levels(first, low * span)
        weighted = q * weights
        sum_q, sum_qq, sum_qx = weighted.sum(-1), (q * weighted).sum(-1), (values * weighted).sum(-1)
        spread = total * sum_qq - sum_q * sum_q
        scale = torch.where(spread > 0.0, (total * sum_qx - sum_x * sum_q) / spread, first)
        offset = (sum_x - scale * sum_q) / total
        if below_zero:
            above = offset > 0.0
            offset = torch.where(above, 0.0, offset)
            scale = torch.where(above & (sum_qq > 0.0), sum_qx / sum_qq, scale)
        error = values - q * scale.unsqueeze(-1) - offset.unsqueeze(-1)
        loss = (error.square_() * weights).sum(-1)
        better = used & (loss < best) & (scale > 0.0)
        best, chosen = torch.where(better, loss, best), torch.where(better, scale, chosen)
        offsets = torch.where(better, offset, offsets)
    return chosen, offsets


def _codes(numbers: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """``numbers [rows, groups]`` → ``d [rows, blocks]`` fp16 and whole codes ``[rows, groups]`` of d."""
    assert scheme.block is not None
    assert scheme.group is not None
    largest = _LARGEST_CODE[scheme.block]
    blocks = torch.unflatten(numbers, 1, (-1, BLOCK_TYPES[scheme.block].block // scheme.group))
    d = (blocks.abs().amax(-1) / largest).half()
    inverse = torch.where(d != 0.0, d.float().reciprocal(), 0.0).unsqueeze(-1)
    # fp16 may round d down, and then the largest number lies beyond the largest code.
    return d, (blocks * inverse).round_().clamp_(-largest, largest).flatten(1)


def _times(d: Tensor, codes: Tensor) -> Tensor:
    return (torch.unflatten(codes, 1, (d.shape[1], -1)) * d.float().unsqueeze(-1)).flatten(1)


def _nested(groups: _Groups, scale: Tensor) -> Grid:
    d, codes = _codes(scale, groups.scheme)
    return Grid(_times(d, codes), nested=Nested(d, codes))


def _nested_with_offset(groups: _Groups, scale: Tensor, offset: Tensor) -> Grid:
    d, codes = _codes(scale, groups.scheme)
    stored = _times(d, codes)
    # The best offset for the integers that the stored scale gives.
    q, _ = groups.levels(stored, offset)
    error = (groups.values - q * stored.unsqueeze(-1)) * groups.weights
    d_min, mins = _codes(-(error.sum(-1) / groups.weights.sum(-1)).clamp_max(0.0), groups.scheme)
    grid = Grid(stored, offset=-_times(d_min, mins))
    return replace(grid, nested=Nested(d, codes, d_min, mins))
