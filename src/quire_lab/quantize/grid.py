"""Integers of a matrix with what they stand for: a scale for each group of inputs, and maybe zero points.

w[n, k] ≈ scale[n, k // group] · (q[n, k] − zero[n, k // group])        q, zero signed, of `Scheme.bits`
w[n, k] ≈ scale[n, k // group] · table[q[n, k]] + offset[n, k // group]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.quant.stored import row_ranges
from quire_lab.quantize.scheme import Scheme


@dataclass(frozen=True, slots=True)
class Nested:
    """Scales of a K type of GGUF: ``d`` and ``d_min`` fp16 ``[rows, blocks]`` times ``codes`` and ``mins``."""

    d: Tensor
    codes: Tensor  # [rows, groups]
    d_min: Tensor | None = None
    mins: Tensor | None = None  # [rows, groups]


@dataclass(frozen=True, slots=True)
class Grid:
    """Levels of groups: ``scale`` fp32 and ``zero`` ``[rows, groups]``; None: the middle.

    ``offset [rows, groups]``: what is added to each product, in place of zero points. ``table``: q is an index in these
    rising numbers. ``nested``: the parts that ``scale`` and ``offset`` are products of.
    """

    scale: Tensor
    zero: Tensor | None = None
    offset: Tensor | None = None
    table: Tensor | None = None
    nested: Nested | None = None


@dataclass(frozen=True, slots=True)
class Rounded:
    """One matrix: ``q [out, in]`` int8, or e4m3, on ``grid``."""

    scheme: Scheme
    q: Tensor
    grid: Grid

    def expand(self) -> Tensor:
        """Return the fp32 matrix ``[out, in]`` that a reader decodes."""
        groups = self.grid.scale.shape[1]
        numbers = self.q.float() if self.grid.table is None else self.grid.table[self.q.int()]
        numbers = torch.unflatten(numbers, 1, (groups, -1))
        if self.grid.zero is not None:
            numbers = numbers - self.grid.zero.unsqueeze(-1)
        weights = numbers * self.grid.scale.unsqueeze(-1)
        if self.grid.offset is not None:
            weights += self.grid.offset.unsqueeze(-1)
        return weights.flatten(1)


class Columns:
    """A grid input by input, in an order of them: rounds one input of all rows at a time."""

    def __init__(self, grid: Grid, scheme: Scheme, order: Tensor) -> None:
        """``order [in]``: the inputs, as they are asked for."""
        self._scheme = scheme
        group = len(order) // grid.scale.shape[1]

        def by_input(numbers: Tensor | None) -> Tensor | None:
            return None if numbers is None else numbers[:, order // group].t().contiguous()

        scales = by_input(grid.scale)
        assert scales is not None
        self._scales, self._zeros, self._offsets = scales, by_input(grid.zero), by_input(grid.offset)
        self._table = grid.table

    def round(self, index: int, values: Tensor) -> tuple[Tensor, Tensor]:
        """``values [out]`` of the input at ``index`` of the order → integers, and the weights that they stand for."""
        scale = self._scales[index]
        inverse = torch.where(scale != 0.0, scale.reciprocal(), 0.0)
        offset = None if self._offsets is None else self._offsets[index]
        zero = 0.0 if self._zeros is None else self._zeros[index]
        scaled = (values if offset is None else values - offset) * inverse
        q = nearest(scaled, self._table, self._scheme, zero)
        weights = (q - zero if self._table is None else self._table[q.int()]) * scale
        return q, weights if offset is None else weights + offset


def nearest(scaled: Tensor, table: Tensor | None, scheme: Scheme, zero: Tensor | float = 0.0) -> Tensor:
    """Return the integers of what is divided by its scale already, fp32; overwrites ``scaled``."""
    if table is None:
        return (scaled.round_() + zero).clamp_(scheme.lowest, scheme.highest)
    return torch.bucketize(scaled, (table[1:] + table[:-1]) / 2.0).to(scaled.dtype)


def on_grid(weight: Tensor, scheme: Scheme, grid: Grid) -> Tensor:
    """Return the nearest integers of ``weight [out, in]``, int8."""
    q = torch.empty(weight.shape, dtype=torch.int8)
    groups = grid.scale.shape[1]
    for start, stop in row_ranges(*weight.shape):
        values = torch.unflatten(weight[start:stop].float(), 1, (groups, -1))
        zero = None if grid.zero is None else grid.zero[start:stop]
        if grid.offset is not None:
            values = values - grid.offset[start:stop].unsqueeze(-1)
        q[start:stop] = levels(values, grid.scale[start:stop], zero, scheme, grid.table).flatten(1)
    return q


def levels(
    values: Tensor, scale: Tensor, zero: Tensor | None, scheme: Scheme, table: Tensor | None = None
) -> Tensor:
    """``values [rows, groups, group]`` → fp32 integers of that shape."""
    inverse = torch.where(scale != 0.0, scale.reciprocal(), 0.0).unsqueeze(-1)
    return nearest(values * inverse, table, scheme, 0.0 if zero is None else zero.unsqueeze(-1))
