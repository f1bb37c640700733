"""Round to nearest on load: the plain matrix of any checkpoint → int8 or int4 with symmetric scales.

int8 takes the largest weight of a row or group as 127. Sixteen levels are too few for that: of `DIVISORS`, each the
place of a group's largest weight among −8 … 7, the one is taken that leaves the least square error under the best
scale for its integers, Σ w·q / Σ q² (the error is Σ w² − (Σ w·q)² / Σ q²). Each group stands alone, so the result
depends on neither ranges nor threads.
"""

from __future__ import annotations

import torch

from quire.kernels.linear.packed import QuantizedWeight
from quire.weight_format import WeightFormat

# The largest weight of a group becomes −divisor: beyond 8 it is cut off, below it not all levels are used.
DIVISORS = (8.0, 7.0, 7.4, 7.7, 8.3, 8.6, 9.0)


def quantize(weight: torch.Tensor, held: WeightFormat) -> QuantizedWeight:
    """``weight [out, in]`` → ``held``, which has no offset; the last group of a row may be short."""
    assert not held.has_offset
    num_rows, in_features = weight.shape
    group = held.group or in_features
    padded = torch.nn.functional.pad(weight.float(), (0, -in_features % group))
    values = torch.unflatten(padded, 1, (-1, group))
    q, scale = _int4(values) if held.kind == "int4" else _int8(values)
    return QuantizedWeight(held, q.flatten(1)[:, :in_features].contiguous(), scale.view(num_rows, -1))


def _int8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[out, groups, group]`` → q int8 of that shape and scale ``[out, groups, 1]``."""
    largest = values.abs().amax(-1, keepdim=True)
    q = (values * _inverse(largest, 127.0)).round_().clamp_(-127, 127)
    return q.to(torch.int8), largest / 127.0


def _int4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    extreme = torch.where(
        -low >= high, low, high
    )  # with its sign: it becomes −8, the one level without a twin
    best = torch.full_like(extreme, -1.0)
    scale, divisor = torch.zeros_like(extreme), torch.full_like(extreme, DIVISORS[0])
    for each in DIVISORS:
        q = _levels(values, _inverse(extreme, -each))
        along, size = (values * q).sum(-1, keepdim=True), q.square().sum(-1, keepdim=True)
        gain = along.square() / size
        better = gain > best  # NaN, of a group of zeros, is not
        best = torch.where(better, gain, best)
        scale = torch.where(better, along / size, scale)
        divisor = torch.where(better, each, divisor)
    return _levels(values, _inverse(extreme, -divisor)).to(torch.int8), scale


def _levels(values: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    return (values * inverse).round_().clamp_(-8, 7)


def _inverse(largest: torch.Tensor, level: torch.Tensor | float) -> torch.Tensor:
    """What ``largest`` is multiplied with to become ``level``; 0 where it is 0."""
    return torch.where(largest == 0, 0.0, level / largest)
