"""Linear with int8 or int4 weights in torch: the order of arithmetic that every backend keeps, bit for bit.

With q_x, s_x, sums of `kernels.quantized_rows`, and D[g] = Σ q_x·q_w over the inputs of group g, an exact integer:

    one scale an output feature    t = fp32(D) · scale             with offsets  t = fma(fp32(sums), offset, t)
    int4 of two levels             the same, with D over `QuantizedWeight.integers`
    groups, g ascending            f = fma(fp32(D[g]), scale[g], f)         then  f = fma(fp32(sums[g]), offset[g], f)
                                   t = f · power                   (`storable_scales`; a power of two, so exact)
    y = t · s_x, with a bias       fma(t, s_x, bias), rounded once to the dtype of x

The dots are exact in fp32 as long as no partial sum reaches 2²⁴: 1,024 products of 127 · 128 do not. An fma is done in
fp64, where the product is exact; the second rounding could differ from a true fma's in one of some 2²⁹ cases.
"""

from __future__ import annotations

import torch

from quire.kernels.linear.packed import PackedLinear, QuantizedWeight, storable_scales
from quire.kernels.quantized_rows import SMALLEST, QuantizedRows, num_groups, padded_size, row_stride
from quire.kernels.registry import register
from quire.weight_format import WeightFormat

EXACT_SUM = 1024  # products of two int8 whose sum fp32 holds exactly, in any order


@register("quantize_rows", "reference")
def quantize_rows(x: torch.Tensor, group: int | None) -> QuantizedRows:
    """``x [num_tokens, in_features]``; the contract is in `kernels.quantized_rows`."""
    in_features = x.shape[1]
    values = x.float()
    largest = values.abs().amax(1, keepdim=True)  # NaN and infinity come through
    finite = torch.isfinite(largest)
    used = finite & (largest >= SMALLEST)
    inverse = (
        torch.full_like(largest, 127.0) / largest
    )  # 127.0 / largest is a reciprocal and a product in torch
    q = torch.where(used, torch.round(values * inverse), 0.0)
    scale = torch.where(used, largest / 127.0, torch.where(finite, 0.0, torch.nan))
    rows = torch.zeros(x.shape[0], row_stride(in_features, group), dtype=torch.int8)
    rows[:, :in_features] = q
    groups = num_groups(in_features, group)
    sums = torch.unflatten(rows[:, : padded_size(in_features, group)], 1, (groups, -1)).sum(
        -1, dtype=torch.int32
    )
    return QuantizedRows(rows, scale.squeeze(1), sums, in_features, group, x.dtype)


def scale_group(format: WeightFormat) -> int | None:
    """Return the inputs that share a scale: of two levels the whole row."""
    return None if format.two_level else format.group


@register("quantized_linear.pack_empty", "reference")
def pack_empty(out_features: int, in_features: int, format: WeightFormat) -> PackedLinear:
    """int8 ``[out, in]`` (int4 too), scales and offsets fp32 ``[out, groups]`` as the native layouts can hold them."""
    groups = num_groups(in_features, scale_group(format))
    return PackedLinear(
        out_features,
        in_features,
        torch.zeros(out_features, in_features, dtype=torch.int8),
        scale=torch.zeros(out_features, groups),
        offset=torch.zeros(out_features, groups) if format.has_offset else None,
    )


@register("quantized_linear.write_rows", "reference")
def write_rows(packed: PackedLinear, start: int, weight: QuantizedWeight) -> None:
    assert packed.scale is not None
    place = slice(start, start + weight.shape[0])
    packed.data[place] = weight.integers
    scale, offset = weight.scale, weight.offset
    if scale_group(packed.format) is not None:
        scale, offset, power = storable_scales(scale, offset)
        scale = scale.float() * power.unsqueeze(1)
        offset = None if offset is None else offset.float() * power.unsqueeze(1)
    packed.scale[place] = scale
    if offset is not None:
        assert packed.offset is not None
        packed.offset[place] = offset


@register("quantized_linear.read_rows", "reference")
def read_rows(packed: PackedLinear, ids: torch.Tensor) -> torch.Tensor:
    assert packed.scale is not None
    offset = None if packed.offset is None else packed.offset[ids]
    return dequantize(packed.data[ids], packed.scale[ids], offset, scale_group(packed.format)).to(
        packed.dtype
    )


def dequantize(
    q: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None, group: int | None
) -> torch.Tensor:
    """``q [n, in]``, scale and offset ``[n, groups]`` → fp32 ``[n, in]``."""
    in_features = q.shape[1]
    repeats = group or in_features
    w = q.float() * scale.repeat_interleave(repeats, 1)[:, :in_features]
    return w if offset is None else w + offset.repeat_interleave(repeats, 1)[:, :in_features]


@register("quantized_linear", "reference")
def linear(rows: QuantizedRows, packed: PackedLinear, out: torch.Tensor | None) -> torch.Tensor:
    """``rows`` of in_features → ``[num_tokens, out_features]`` in the dtype that they had."""
    assert packed.scale is not None
    group = scale_group(packed.format)
    if group is None:
        t = _dots(rows.q, packed.data, 0, packed.in_features).float() * packed.scale[:, 0]
        if packed.offset is not None:
            t = _fma(rows.sums, packed.offset[:, 0], t)
    else:
        t = torch.zeros(rows.num_tokens, packed.out_features)
        for g in range(packed.scale.shape[1]):
            end = min((g + 1) * group, packed.in_features)
            t = _fma(_dots(rows.q, packed.data, g * group, end), packed.scale[:, g], t)
            if packed.offset is not None:
                t = _fma(rows.sums[:, g : g + 1], packed.offset[:, g], t)
    s_x = rows.scale.unsqueeze(1)
    y = (t * s_x if packed.bias is None else _fma(t, s_x, packed.bias)).to(rows.dtype)
    return y if out is None else out.copy_(y)


def _dots(x: torch.Tensor, w: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Exact ``x[:, start:end] · w[:, start:end]ᵀ`` as fp64 ``[num_tokens, out]``."""
    total = torch.zeros(x.shape[0], w.shape[0], dtype=torch.float64)
    for first in range(start, end, EXACT_SUM):
        last = min(first + EXACT_SUM, end)
        total += x[:, first:last].float() @ w[:, first:last].float().t()
    return total


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return (a.double() * b.double() + c.double()).float()
