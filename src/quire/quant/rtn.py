"""Round to nearest on load: the plain matrix of any checkpoint → int8 or int4 with symmetric scales.

int8 takes the largest weight of a row or group as 127. Sixteen levels are too few for that: int4 tries `DIVISORS`,
each the place of a group's largest weight among −8 … 7, and takes the one that leaves the least square error under the
best scale for its integers, Σ w·q / Σ q² (the error is Σ w² − (Σ w·q)² / Σ q²). Each group stands alone, so the result
depends on neither ranges nor threads. A group with NaN or infinity gets the scale NaN, never plausible numbers.

int4 of two levels (`quire.weight_format`): the largest weight of a row is `TOP` times a first scale, each group takes
the multiplier of `NEIGHBOURS` that leaves the least square error under it, and the row finally gets the best scale for
its integers. A row with NaN or infinity gets the scale NaN.

The torch version is the reference, in an order of summation that every level of the native one
(csrc/cpu/quantize_weights_kernel.cpp) keeps bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.linear.packed import QuantizedWeight
from quire.kernels.linear.reference import scaled_to_fp8
from quire.kernels.quantized_rows import SMALLEST, num_groups
from quire.kernels.registry import NATIVE_LEVELS, Backend, native, op
from quire.kernels.rotation import rotate_weights
from quire.kernels.threads import num_native_threads
from quire.kernels.workspace import address, rows_at, unit_stride
from quire.weight_format import BITS, WeightFormat

# The largest weight of a group becomes −divisor: beyond 8 it is cut off, below it not all levels are used.
DIVISORS = (8.0, 7.0, 7.4, 7.7, 8.3, 8.6, 9.0)
TOP = 116.0  # below 120, so the largest weight is cut off a little
NEIGHBOURS = (-1, 0, 1, 2, 3)  # steps from the multiplier that makes a group's largest 8
PARTIALS = 4  # partial sums of Σ w·q; weight i belongs to sum i mod 4


def quantize(weight: Tensor, held: WeightFormat, *, backend: Backend = "reference") -> QuantizedWeight:
    """``weight [out, in]`` → ``held``, which has no offset; the last group may be short. fp8: one scale per row."""
    assert held.quantized
    assert not held.has_offset
    if held.kind == "fp8":
        assert held.group is None, held
        return QuantizedWeight(held, *scaled_to_fp8(weight.float()))
    return round_to_nearest.on(backend)(weight, held)


@op("round_to_nearest")
def round_to_nearest(weight: Tensor, held: WeightFormat) -> QuantizedWeight:
    """``weight [out, in]`` → ``held``, of integers: of the matrix as it is, or rotated."""
    if held.rotation is not None:
        weight = rotate_weights(weight, held.rotation)
    if held.two_level:
        return _two_levels(weight, held)
    num_rows, in_features = weight.shape
    group = held.group or in_features
    padded = torch.nn.functional.pad(weight.float(), (0, -in_features % group))
    values = torch.unflatten(padded, 1, (-1, group))
    largest = values.abs().amax(-1, keepdim=True)  # NaN and infinity are kept
    finite = torch.isfinite(largest)
    used = finite & (largest > SMALLEST)
    q, scale = _int4(values, used) if held.kind == "int4" else _int8(values, largest)
    q = torch.where(used, q, 0.0).to(torch.int8)
    scale = torch.where(used, scale, torch.where(finite, 0.0, torch.nan))
    return QuantizedWeight(held, q.flatten(1)[:, :in_features].contiguous(), scale.view(num_rows, -1))


def _int8(values: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """``[out, groups, group]`` → q of that shape and scale ``[out, groups, 1]``, both fp32."""
    inverse = torch.full_like(largest, 127.0) / largest  # not 127.0 / largest: torch makes that a reciprocal
    return (values * inverse).round_().clamp_(-127, 127), largest / 127.0


def _int4(values: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    # With its sign: it becomes −8, the one level without a twin.
    extreme = torch.where(-low >= high, low, high)
    reciprocal = torch.where(used, extreme.reciprocal(), 0.0)
    best = torch.full_like(extreme, -1.0)
    scale, inverse = torch.zeros_like(extreme), torch.zeros_like(extreme)
    for divisor in DIVISORS:
        factor = reciprocal * -divisor
        q = _levels(values, factor)
        along, size = _sum(values * q), q.square().sum(-1, keepdim=True)  # the second is exact in any order
        gain = along.square() / size
        better = gain > best  # False for the NaN of a group of zeros
        best = torch.where(better, gain, best)
        scale = torch.where(better, along / size, scale)
        inverse = torch.where(better, factor, inverse)
    return _levels(values, inverse), scale


def _two_levels(weight: Tensor, held: WeightFormat) -> QuantizedWeight:
    assert held.group is not None
    in_features = weight.shape[1]
    padded = torch.nn.functional.pad(weight.float(), (0, -in_features % held.group))
    values = torch.unflatten(padded, 1, (-1, held.group))
    largest = values.abs().amax(-1, keepdim=True)
    top = largest.amax(1, keepdim=True)
    finite = torch.isfinite(top)
    used = finite & (top > SMALLEST)
    step, inverse = top / TOP, torch.where(used, torch.full_like(top, TOP) / top, 0.0)
    first = (largest * inverse * 0.125).floor()
    best = torch.full_like(largest, -torch.inf)
    chosen = [torch.zeros_like(largest) for _ in range(3)]  # multiplier, Σ w·q, Σ q²
    for neighbour in NEIGHBOURS:
        m = (first + neighbour).clamp(1, 15)
        q = _side_levels(values, inverse / m, m)
        along, size = _sum(values * q), q.square().sum(-1, keepdim=True)
        gain = (along + along - step * m * size) * m  # decrease of the square error, over step
        better = gain > best
        best = torch.where(better, gain, best)
        chosen = [torch.where(better, *pair) for pair in zip((m, along, size), chosen, strict=True)]
    m, along, size = chosen
    q = _side_levels(values, inverse / m, m) - m % 2
    wide = m.double()
    total, squares = torch.zeros_like(top[:, 0], dtype=torch.float64), (wide * wide * size.double()).sum(1)
    for column in (wide * along.double()).unbind(1):
        total += column
    scale = (total / squares).float()
    return QuantizedWeight(
        held,
        torch.where(used, q, 0.0).to(torch.int8).flatten(1)[:, :in_features].contiguous(),
        torch.where(used[:, 0], scale, torch.where(finite[:, 0], 0.0, torch.nan)),
        multiplier=torch.where(used, m, 0.0).to(torch.uint8).squeeze(2),
    )


def _side_levels(values: Tensor, inverse: Tensor, m: Tensor) -> Tensor:
    """−7 … 8 for odd multipliers, −8 … 7 for even ones."""
    odd = m % 2
    return torch.minimum(torch.maximum((values * inverse).round_(), odd - 8.0), odd + 7.0)


def _levels(values: Tensor, inverse: Tensor) -> Tensor:
    return (values * inverse).round_().clamp_(-8, 7)


def _sum(products: Tensor) -> Tensor:
    """Sum ``[..., group]`` to ``[..., 1]`` in a stated order."""
    steps = torch.unflatten(products, -1, (-1, PARTIALS)).unbind(-2)
    partial = steps[0].clone()
    for step in steps[1:]:
        partial += step
    return ((partial[..., 0] + partial[..., 2]) + (partial[..., 1] + partial[..., 3])).unsqueeze(-1)


@round_to_nearest.native(NATIVE_LEVELS)
def round_to_nearest_native(isa: str, weight: Tensor, held: WeightFormat) -> QuantizedWeight:
    if weight.dtype not in (torch.bfloat16, torch.float32):
        weight = weight.float()
    weight, (num_rows, in_features) = unit_stride(weight), weight.shape
    q = torch.empty(num_rows, in_features, dtype=torch.int8)
    groups = num_groups(in_features, held.group)
    scale = torch.empty(num_rows, 1 if held.two_level else groups)
    multiplier = torch.empty(num_rows, groups, dtype=torch.uint8) if held.two_level else None
    native.quantize_weights(
        num_native_threads(), isa, BITS[held.kind], held.group or in_features, weight.dtype == torch.bfloat16,
        *rows_at(weight), num_rows, in_features, held.rotation or 0, q.data_ptr(), scale.data_ptr(),
        address(multiplier),
    )  # fmt: skip
    return QuantizedWeight(held, q, scale, multiplier=multiplier)
