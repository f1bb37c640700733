"""Exact linears in torch: plain, with int8 or int4 weights, and with fp8 weights.

**Plain.** Always the same GEMM, 32 rows by the whole matrix, so a row's bits do not depend on the batch. A library GEMM
promises no order of summation, and picks its code by the shape of the product and the number of threads. With both
fixed the code is fixed; what is left is whether the result of a row depends on its place in the tile or on the other
rows. Measured with torch 2.13 (MKL for fp32, oneDNN for bf16), on Zen 4 and on Emerald Rapids:

* it does for fp32 where in_features is odd and out_features < 16 (MKL's edge kernels sum in another order);
* it never did when both are multiples of 32, which is why the matrix is padded with zeros to that;
  zeros add nothing to a sum, so padding changes no result. Real models hardly pad;
* on the Intel CPU a sum over in_features ≥ 1024 is split between the threads in some shapes, so every product runs
  on one thread, whatever torch's number is.

``tests/kernels/test_linear.py`` checks this on the machine at hand.

**Integers.** The order of arithmetic that every CPU backend keeps, bit for bit. With q_x, s_x, sums of
`kernels.quantized_rows`, and D[g] = Σ q_x·q_w over the inputs of group g, an exact integer:

    one scale per output feature   t = fp32(D) · scale             with offsets  t = fma(fp32(sums), offset, t)
    int4 of two levels             the same, with D over `QuantizedWeight.integers`
    y = t · s_x, with a bias       fma(t, s_x, bias), rounded once to the dtype of x

With groups, rows have a scale per block b. Parts p of the smaller of group and block, each with the scale of its group
g and of its block b, ascending:

    f = fma(fp32(D[p]) · s_x[b], scale[g], f)        then  f = fma(s_x[b] · fp32(sums[p]), offset[g], f)
    t = f · power                                    (`storable_scales`; a power of two, so exact; 1 of other scales)
    y = t, with a bias t + bias, rounded once to the dtype of x

The dots are exact in fp32 as long as no partial sum reaches 2²⁴: 1,024 products of 127 · 128 do not. An fma is computed
in fp64, where the product is exact; the second rounding could differ from a true fma's in one of about 2²⁹ cases.

**fp8** (float8_e4m3fn), the oracle of a GPU's versions; no engine on a CPU uses it.

    y = Σ_g D[g] · s_x[g] · s_w[g] (+ bias), rounded once        D[g] = Σ q_x · q_w over the inputs of group g

Rows are quantized in the op, with one scale per row, or per row and group where weights have groups: the largest
magnitude becomes 448 (Micikevicius et al. 2022, "FP8 Formats for Deep Learning"; groups of 128 as in DeepSeek-V3). Sums
are in fp64: a product of two e4m3 numbers has at most 8 bits, so every D is exact, in any order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.linear.packed import HeadMatrices, PackedLinear, QuantizedWeight, held_scales
from quire.kernels.quantized_rows import (
    SMALLEST,
    QuantizedRows,
    num_blocks,
    num_groups,
    num_parts,
    padded_size,
    part_size,
    row_stride,
    scales_of,
)
from quire.kernels.registry import register
from quire.kernels.rotation import rotate_rows
from quire.kernels.threads import one_torch_thread
from quire.weight_format import RowFormat, WeightFormat

TILE_ROWS = 32
ALIGN = 32  # features
EXACT_SUM = 1024  # int8 products that fp32 sums exactly, in any order
FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # largest float8_e4m3fn


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@register("linear.pack_empty", "reference")
def pack_empty(out_features: int, in_features: int, dtype: torch.dtype) -> PackedLinear:
    """Row-major ``[out_features, in_features]``, both padded with zeros to a multiple of 32."""
    data = torch.zeros(round_up(out_features, ALIGN), round_up(in_features, ALIGN), dtype=dtype)
    data[out_features:].zero_()  # only the padding: the rest stays untouched memory
    data[:, in_features:].zero_()
    return PackedLinear(out_features, in_features, data)


@register("linear.write_rows", "reference")
def write_rows(packed: PackedLinear, start: int, weight: Tensor) -> None:
    packed.data[start : start + weight.shape[0], : packed.in_features].copy_(weight)


@register("linear.read_rows", "reference")
def read_rows(packed: PackedLinear, ids: Tensor) -> Tensor:
    return packed.data.index_select(0, ids)[:, : packed.in_features]


@register("linear", "reference")
def linear(x: Tensor, packed: PackedLinear, out_dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """One GEMM for every 32 rows."""
    num_tokens, in_features = x.shape
    num_rows = round_up(num_tokens, TILE_ROWS)
    weight = packed.data.t()
    if num_rows != num_tokens or weight.shape[0] != in_features:
        x = torch.constant_pad_nd(x, (0, weight.shape[0] - in_features, 0, num_rows - num_tokens))
    x = x.contiguous()
    y = x.new_empty(num_rows, weight.shape[1])
    with one_torch_thread():
        for start in range(0, num_rows, TILE_ROWS):
            torch.mm(x[start : start + TILE_ROWS], weight, out=y[start : start + TILE_ROWS])
    y = y[:num_tokens]
    if weight.shape[1] != packed.out_features:
        y = y[:, : packed.out_features]
    y = (y if packed.bias is None else y + packed.bias).to(out_dtype)
    return y if out is None else out.copy_(y)


@register("head_linear.pack", "reference")
def pack_heads(weight: Tensor) -> Tensor:
    """``[num_heads, in_size, out_size]`` → the same, both sizes padded with zeros to a multiple of 32."""
    heads, in_size, out_size = weight.shape
    packed = weight.new_zeros(heads, round_up(in_size, ALIGN), round_up(out_size, ALIGN))
    packed[:, :in_size, :out_size] = weight
    return packed


@register("head_linear", "reference")
def head_linear(x: Tensor, heads: HeadMatrices, out: Tensor) -> None:
    """One bmm for every 32 tokens."""
    assert isinstance(heads.data, Tensor)
    num_tokens, num_heads, in_size = x.shape
    tiles = x.new_zeros(num_heads, round_up(num_tokens, TILE_ROWS), heads.data.shape[1])
    tiles[:, :num_tokens, :in_size] = x.transpose(0, 1)
    for start in range(0, num_tokens, TILE_ROWS):
        with one_torch_thread():
            product = torch.bmm(tiles[:, start : start + TILE_ROWS], heads.data)
        out[start : start + TILE_ROWS] = product[:, : num_tokens - start, : heads.out_size].transpose(0, 1)


@register("quantize_rows", "reference")
def quantize_rows(x: Tensor, format: RowFormat) -> QuantizedRows:
    """``x [num_tokens, in_features]``; the contract is in `kernels.quantized_rows`."""
    in_features = x.shape[1]
    blocks = num_blocks(in_features, format)
    rotated = rotate_rows(x, format.rotation)
    padded = torch.nn.functional.pad(rotated, (0, blocks * (format.block or in_features) - in_features))
    values = torch.unflatten(padded, 1, (blocks, -1))
    largest = values.abs().amax(2, keepdim=True)  # NaN and infinity are kept
    used, scale = scales_of(largest, format)
    inverse = torch.full_like(largest, 127.0) / largest  # not 127.0 / largest: torch makes that a reciprocal
    q = torch.where(used, torch.round(values * inverse), 0.0)
    rows = torch.zeros(x.shape[0], row_stride(in_features, format.group), dtype=torch.int8)
    rows[:, :in_features] = q.flatten(1)[:, :in_features]
    parts = torch.unflatten(
        rows[:, : padded_size(in_features, format.group)], 1, (num_parts(in_features, format), -1)
    )
    sums = parts.sum(-1, dtype=torch.int32)
    return QuantizedRows(rows, scale.squeeze(2), sums, in_features, format, x.dtype)


def scale_group(format: WeightFormat) -> int | None:
    """Return the inputs that share a scale; None is the whole row, as in int4 of two levels."""
    return None if format.two_level else format.group


@register("quantized_linear.pack_empty", "reference")
def int_pack_empty(out_features: int, in_features: int, format: WeightFormat) -> PackedLinear:
    """int8 ``[out, in]`` (int4 too), scales and offsets fp32 ``[out, groups]`` as the native layouts can hold them."""
    groups = num_groups(in_features, scale_group(format))
    data, scale = torch.zeros(out_features, in_features, dtype=torch.int8), torch.zeros(out_features, groups)
    offset = torch.zeros_like(scale) if format.has_offset else None
    return PackedLinear(out_features, in_features, data, scale=scale, offset=offset)


@register("quantized_linear.write_rows", "reference")
def int_write_rows(packed: PackedLinear, start: int, weight: QuantizedWeight) -> None:
    assert packed.scale is not None
    place = slice(start, start + weight.shape[0])
    packed.data[place] = weight.integers
    scale, offset = weight.scale, weight.offset
    if scale_group(packed.format) is not None:
        scale, offset = held_scales(weight)
    packed.scale[place] = scale
    if offset is not None:
        assert packed.offset is not None
        packed.offset[place] = offset


@register("quantized_linear.read_rows", "reference")
def int_read_rows(packed: PackedLinear, ids: Tensor) -> Tensor:
    assert packed.scale is not None
    offset = None if packed.offset is None else packed.offset[ids]
    weights = dequantize(packed.data[ids], packed.scale[ids], offset, scale_group(packed.format))
    return rotate_rows(weights, packed.format.rotation).to(packed.dtype)


def dequantize(q: Tensor, scale: Tensor, offset: Tensor | None, group: int | None) -> Tensor:
    """``q [n, in]``, scale and offset ``[n, groups]`` → fp32 ``[n, in]``."""
    in_features = q.shape[1]
    repeats = group or in_features
    w = q.float() * scale.repeat_interleave(repeats, 1)[:, :in_features]
    return w if offset is None else w + offset.repeat_interleave(repeats, 1)[:, :in_features]


@register("quantized_linear", "reference")
def int_linear(rows: QuantizedRows, packed: PackedLinear, out: Tensor | None) -> Tensor:
    assert packed.scale is not None
    if rows.format.block is None:
        t = _dots(rows.q, packed.data, 0, packed.in_features).float() * packed.scale[:, 0]
        if packed.offset is not None:
            t = _fma(rows.sums, packed.offset[:, 0], t)
        y = t * rows.scale if packed.bias is None else _fma(t, rows.scale, packed.bias)
    else:
        t = _sum_of_parts(rows, packed, packed.scale)
        y = t if packed.bias is None else t + packed.bias
    y = y.to(rows.dtype)
    return y if out is None else out.copy_(y)


def _sum_of_parts(rows: QuantizedRows, packed: PackedLinear, scale: Tensor) -> Tensor:
    """The product with weights that have groups: fp32 ``[num_tokens, out]``."""
    group, part, block = (n or 0 for n in (rows.format.group, part_size(rows.format), rows.format.block))
    t = torch.zeros(rows.num_tokens, packed.out_features)
    for p in range(rows.sums.shape[1]):
        start = p * part
        g, s_x = start // group, rows.scale[:, start // block].unsqueeze(1)
        dots = _dots(rows.q, packed.data, start, min(start + part, packed.in_features))
        t = _fma((dots * s_x).float(), scale[:, g], t)
        if packed.offset is not None:
            t = _fma(s_x * rows.sums[:, p : p + 1], packed.offset[:, g], t)
    return t


def _dots(x: Tensor, w: Tensor, start: int, end: int) -> Tensor:
    """Exact ``x[:, start:end] · w[:, start:end]ᵀ`` as fp64 ``[num_tokens, out]``."""
    total = torch.zeros(x.shape[0], w.shape[0], dtype=torch.float64)
    for first in range(start, end, EXACT_SUM):
        last = min(first + EXACT_SUM, end)
        total += x[:, first:last].float() @ w[:, first:last].float().t()
    return total


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (a.double() * b.double() + c.double()).float()


def scaled_to_fp8(values: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 ``[..., n]`` → fp8 of that shape and one scale per last dimension, fp32 ``[..., 1]``."""
    largest = values.abs().amax(-1, keepdim=True)  # NaN and infinity are kept, and stay visible
    used = ~(largest < SMALLEST)
    inverse = torch.where(used, torch.full_like(largest, LARGEST) / largest, 0.0)
    return (values * inverse).to(FP8), torch.where(used, largest / LARGEST, 0.0)


@register("quantize_rows_to_fp8", "reference")
def quantize_rows_to_fp8(x: Tensor, format: RowFormat) -> QuantizedRows:
    """``x [num_tokens, in_features]``; ``scale [num_tokens, groups]``."""
    group, groups = format.group, num_groups(x.shape[1], format.group)
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % (group or 1)))
    q, scale = scaled_to_fp8(torch.unflatten(padded, 1, (groups, -1)))
    q = q.flatten(1)[:, : x.shape[1]]
    return QuantizedRows(
        q, scale.squeeze(-1), q.new_empty(len(q), 0, dtype=torch.int32), x.shape[1], format, x.dtype
    )


@register("fp8_linear.pack_empty", "reference")
def fp8_pack_empty(out_features: int, in_features: int, format: WeightFormat) -> PackedLinear:
    """fp8 ``[out, in]``, scales fp32 ``[out, groups]``."""
    data = torch.zeros(out_features, in_features, dtype=FP8)
    scale = torch.zeros(out_features, num_groups(in_features, format.group))
    return PackedLinear(out_features, in_features, data, scale=scale)


@register("fp8_linear.write_rows", "reference")
def fp8_write_rows(packed: PackedLinear, start: int, weight: QuantizedWeight) -> None:
    assert packed.scale is not None
    place = slice(start, start + weight.shape[0])
    packed.data[place] = weight.q
    packed.scale[place] = weight.scale


@register("fp8_linear.read_rows", "reference")
def fp8_read_rows(packed: PackedLinear, ids: Tensor) -> Tensor:
    assert packed.scale is not None
    return dequantize(packed.data[ids], packed.scale[ids], None, packed.format.group).to(packed.dtype)


@register("fp8_linear", "reference")
def fp8_linear(rows: QuantizedRows, packed: PackedLinear, out: Tensor | None) -> Tensor:
    assert packed.scale is not None
    total = torch.zeros(rows.num_tokens, packed.out_features, dtype=torch.float64)
    width = packed.format.group or packed.in_features
    for g in range(packed.scale.shape[1]):
        part = slice(g * width, (g + 1) * width)
        dots = rows.q[:, part].double() @ packed.data[:, part].double().t()
        total += dots * (rows.scale[:, g : g + 1] * packed.scale[:, g])
    y = (total if packed.bias is None else total + packed.bias).to(rows.dtype)
    return y if out is None else out.copy_(y)
