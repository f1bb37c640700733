"""The grid of each group of a matrix, searched for, and rounding to the nearest of its levels.

A grid is searched among clipping points, since few levels do not pay for reaching a group's largest weight. What a
search compares is the square error, each input's weighted where ``importance`` is given. Scales are rounded to
what is stored before integers are chosen: fp16 of so few significant bits that the product with an integer of 4 bits is
exact in fp16. All readers then decode the same numbers, and to read scales as bfloat16 loses nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.device import detect_device
from quire.kernels.linear.reference import scaled_to_fp8
from quire.kernels.quantized_rows import SMALLEST
from quire.kernels.registry import NATIVE_LEVELS, Backend, native
from quire.quant.rtn import DIVISORS, quantize
from quire.quant.stored import row_ranges
from quire.weight_format import BITS, GROUPS, WeightFormat
from quire_lab.quantize.gguf.grids import fit_blocks
from quire_lab.quantize.grid import Grid, Rounded, levels, on_grid
from quire_lab.quantize.nf4 import round_to_nf4
from quire_lab.quantize.scheme import NF4, Scheme


def round_to_nearest(weight: Tensor, scheme: Scheme, importance: Tensor | None = None) -> Rounded:
    """``weight [out, in]`` → its integers; ``importance [in]`` weights the square errors of inputs."""
    if scheme.floats:
        return _floats(weight.float(), scheme)
    if scheme == NF4:
        return round_to_nf4(weight)
    grid = fit_grid(weight, scheme, importance)
    return Rounded(scheme, on_grid(weight, scheme, grid), grid)


def _floats(weight: Tensor, scheme: Scheme) -> Rounded:
    """Return e4m3 with a scale per output feature, or per square block of ``scheme.group`` outputs and inputs."""
    size, rows = scheme.group, len(weight)
    if size is None:
        q, scale = scaled_to_fp8(weight)
        return Rounded(scheme, q, Grid(scale))
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -rows % size))
    blocks = torch.unflatten(torch.unflatten(padded, 1, (-1, size)), 0, (-1, size)).transpose(1, 2)
    q, scale = scaled_to_fp8(blocks.flatten(2))
    q = torch.unflatten(q, 2, (size, size)).transpose(1, 2).flatten(2).flatten(0, 1)[:rows]
    return Rounded(scheme, q, Grid(scale.squeeze(-1).repeat_interleave(size, 0)[:rows]))


def fit_grid(weight: Tensor, scheme: Scheme, importance: Tensor | None = None) -> Grid:
    """Return the grid of every group of ``weight [out, in]``."""
    if scheme.block is not None:
        return fit_blocks(weight, scheme, importance)
    if (
        importance is None
        and scheme.symmetric
        and scheme.bits == BITS["int4"]
        and scheme.group in GROUPS["int4"]
    ):
        # The search of the engine's own rounding, which is native.
        rounded = quantize(weight, WeightFormat("int4", scheme.group), backend=_backend())
        return Grid(stored_scale(rounded.scale, zero_points=False))
    fit = _symmetric if scheme.symmetric else _with_zeros
    groups = scheme.num_groups(weight.shape[1])
    weights = torch.ones(weight.shape[1]) if importance is None else importance.float()
    weights = torch.unflatten(weights / weights.mean().clamp_min(SMALLEST), 0, (groups, -1))
    scales, zeros = [], []
    for start, stop in row_ranges(*weight.shape):
        values = torch.unflatten(weight[start:stop].float(), 1, (groups, -1))
        scale, zero = fit(values, scheme, weights)
        scales.append(scale)
        zeros.append(zero)
    return Grid(torch.cat(scales), None if scheme.symmetric else torch.cat(zeros))


def plain_grid(weight: Tensor, scheme: Scheme) -> Grid:
    """Return the grid whose levels reach the largest weights of each group, with no search but GGUF's blocks."""
    if scheme.block is not None:
        return fit_blocks(weight, scheme)
    groups = scheme.num_groups(weight.shape[1])
    values = torch.unflatten(weight, 1, (groups, -1))
    low, high = values.amin(-1), values.amax(-1)
    if scheme.symmetric:
        largest = torch.maximum(-low, high)
        return Grid(stored_scale(largest / scheme.highest, zero_points=False))
    low, high = low.clamp_max(0.0), high.clamp_min(0.0)
    scale = stored_scale((high - low) / (scheme.highest - scheme.lowest), zero_points=True)
    inverse = torch.where(scale != 0.0, scale.reciprocal(), 0.0)
    return Grid(scale, (scheme.lowest - low * inverse).round_().clamp_(scheme.lowest, scheme.highest))


def _backend() -> Backend:
    isa = detect_device().isa
    level = next((level for level in NATIVE_LEVELS if level == isa), None)
    return "reference" if level is None or native is None else level


def _symmetric(values: Tensor, scheme: Scheme, weights: Tensor) -> tuple[Tensor, Tensor]:
    low, high = values.amin(-1), values.amax(-1)
    # With its sign: at share 1 it becomes the lowest level, the one without a twin.
    extreme = torch.where(-low >= high, low, high)
    used = extreme.abs() > SMALLEST
    best, chosen = torch.zeros_like(extreme), torch.zeros_like(extreme)
    # Levels that the extreme becomes, as a share of the lowest: above 1 it is cut off.
    shares = [divisor / DIVISORS[0] for divisor in DIVISORS]
    if scheme.bits < 4:
        shares = torch.linspace(0.5, 2.0, 16).tolist()
    for share in shares if scheme.bits < 8 else (-scheme.highest / scheme.lowest,):
        scale = extreme / (scheme.lowest * share)
        q = levels(values, scale, None, scheme)
        weighted = q * weights
        along, size = (values * weighted).sum(-1), (q * weighted).sum(-1)
        # What the best scale for these integers takes from the square error.
        gain = torch.where(size > 0.0, along.square() / size, 0.0)
        better = used & (gain > best)
        best = torch.where(better, gain, best)
        chosen = torch.where(better, along / size if scheme.bits < 8 else scale, chosen)
    chosen = stored_scale(chosen, zero_points=False)
    return chosen, torch.zeros_like(chosen)


def _with_zeros(values: Tensor, scheme: Scheme, weights: Tensor) -> tuple[Tensor, Tensor]:
    # Zero is a level, as in every format with zero points.
    low, high = values.amin(-1).clamp_max(0.0), values.amax(-1).clamp_min(0.0)
    used = (high - low) > SMALLEST
    best = torch.full_like(low, torch.inf)
    chosen, zeros = torch.zeros_like(low), torch.zeros_like(low)
    steps = scheme.highest - scheme.lowest
    # Of the range of a group, the rest of which is cut off.
    shares = (
        torch.linspace(1.0, 0.7, 7).tolist() if scheme.bits >= 4 else torch.linspace(1.0, 0.4, 13).tolist()
    )
    for share in shares if scheme.bits < 8 else (1.0,):
        scale = stored_scale((high - low) * (share / steps), zero_points=True)
        inverse = torch.where(scale != 0.0, scale.reciprocal(), 0.0)
        zero = (scheme.lowest - low * share * inverse).round_().clamp_(scheme.lowest, scheme.highest)
        q = levels(values, scale, zero, scheme)
        error = ((values - (q - zero.unsqueeze(-1)) * scale.unsqueeze(-1)).square() * weights).sum(-1)
        better = used & (error < best)
        best, chosen = torch.where(better, error, best), torch.where(better, scale, chosen)
        zeros = torch.where(better, zero, zeros)
    return chosen, zeros


def stored_scale(scale: Tensor, *, zero_points: bool) -> Tensor:
    """Return ``scale`` as it is read back: fp16 of 8 significant bits, of 7 where q − zero is up to 15."""
    mantissa, exponent = torch.frexp(scale)
    size = 128.0 if zero_points else 256.0
    return torch.ldexp((mantissa * size).round_() / size, exponent).half().float()
