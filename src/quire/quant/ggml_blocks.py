"""ggml's block types become integers, scales and offsets without loss (llama.cpp's ``ggml-common.h``).

A block holds 32 weights of a row, or (the K types) 256 in 8 or 16 groups. ``raw [rows, bytes per row]`` uint8.
Types whose bits choose numbers from a table are in `quire.quant.ggml_codebooks`.

    Q8_0  d, 32 int8                        w = d · q
    Q4_0  d, 16 bytes                       w = d · (q − 8)          low halves first, then high halves
    Q4_1  d, m, 16 bytes                    w = d · q + m
    Q5_0  d, 32 high bits, 16 bytes         w = d · (q − 16)
    Q5_1  d, m, 32 high bits, 16 bytes      w = d · q + m
    Q2_K  16 × (scale, min) of 4 bits, 64 bytes, d, dmin                  w = d · scale · q − dmin · min
    Q3_K  32 bytes of high bits, 64 bytes, 16 scales of 6 bits, d         w = d · (scale − 32) · (q − 4)
    Q4_K  d, dmin, 8 × (scale, min) of 6 bits, 128 bytes                  w = d · scale · q − dmin · min
    Q5_K  the same with 32 bytes of high bits before the 128
    Q6_K  128 bytes, 64 bytes of high bits, 16 int8 scales, d             w = d · scale · (q − 32)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from quire.families.gguf_types import BLOCK_TYPES
from quire.kernels.linear.packed import NestedScales, QuantizedWeight
from quire.quant import ggml_codebooks
from quire.quant.ggml_codebooks import Parts, bits, half, halves, planes, stored_half


def _halves(data: Tensor) -> Tensor:
    return halves(data).view(torch.int8)


def _high_bits(blocks: Tensor, at: int) -> Tensor:
    """Four bytes from ``at``: the fifth bit (as 16) of 32 weights, ``[blocks, 32]`` int8."""
    shifts = torch.arange(8, dtype=torch.uint8)
    bits = blocks[:, at : at + 4].unsqueeze(-1) >> shifts & 1
    return (bits.flatten(1) << 4).view(torch.int8)


def _q8_0(blocks: Tensor) -> Parts:
    return blocks[:, 2:].contiguous().view(torch.int8), half(blocks, 0), None


def _q4_0(blocks: Tensor) -> Parts:
    return _halves(blocks[:, 2:]) - 8, half(blocks, 0), None


def _q4_1(blocks: Tensor) -> Parts:
    scale = half(blocks, 0)
    return _halves(blocks[:, 4:]) - 8, scale, scale * 8 + half(blocks, 2)


def _q5_0(blocks: Tensor) -> Parts:
    return (_halves(blocks[:, 6:]) | _high_bits(blocks, 2)) - 16, half(blocks, 0), None


def _q5_1(blocks: Tensor) -> Parts:
    q = _halves(blocks[:, 8:]) | _high_bits(blocks, 4)
    return q, half(blocks, 0), half(blocks, 2)


def _scales_and_mins(packed: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes → 8 scales and 8 mins of 6 bits: the upper two bits of the last four lie over the first four."""
    low, mid, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((low & 63, high & 15 | (low >> 6) << 4), dim=1)
    mins = torch.cat((mid & 63, high >> 4 | (mid >> 6) << 4), dim=1)
    return scales.view(torch.int8), mins


def _k_affine(blocks: Tensor, q: Tensor) -> Parts:
    """Scales and offsets of Q4_K and Q5_K for ``q [blocks, 8, 32]``."""
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    return q, NestedScales(scales, stored_half(blocks, 0), mins, -stored_half(blocks, 2)), None


def _q2_k(blocks: Tensor) -> Parts:
    both = blocks[:, :16]
    scales = (both & 15).view(torch.int8)
    nested = NestedScales(scales, stored_half(blocks, 80), both >> 4, -stored_half(blocks, 82))
    return planes(blocks[:, 16:80]).view(torch.int8), nested, None


def _q3_k(blocks: Tensor) -> Parts:
    high = bits(blocks[:, :32], 1).transpose(1, 2).flatten(1)  # the offset is zero where the bit is set
    q = (planes(blocks[:, 32:96]) | high << 2).view(torch.int8) - 4
    scales = halves(blocks[:, 96:104]) | bits(blocks[:, 104:108], 2).transpose(1, 2).flatten(1) << 4
    return q, NestedScales(scales.view(torch.int8) - 32, stored_half(blocks, 108)), None


def _pairs_of_32(data: Tensor) -> Tensor:
    """128 bytes → ``[blocks, 8, 32]``: each 32 bytes hold one group in their low and one in their high halves."""
    parts = torch.unflatten(data, 1, (4, 32))
    return torch.stack((parts & 15, parts >> 4), dim=2).flatten(1, 2)


def _q4_k(blocks: Tensor) -> Parts:
    return _k_affine(blocks, _pairs_of_32(blocks[:, 16:]).view(torch.int8))


def _q5_k(blocks: Tensor) -> Parts:
    shifts = torch.arange(8, dtype=torch.uint8).unsqueeze(1)
    high = blocks[:, 16:48].unsqueeze(1) >> shifts & 1  # bit g of byte k belongs to group g
    return _k_affine(blocks, (_pairs_of_32(blocks[:, 48:]) | high << 4).view(torch.int8))


def _q6_k(blocks: Tensor) -> Parts:
    low = torch.unflatten(blocks[:, :128], 1, (2, 64))  # two halves of 128 weights
    shifts = torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8)
    high = torch.unflatten(blocks[:, 128:192], 1, (2, 1, 32)) >> shifts
    q = torch.unflatten(torch.cat((low & 15, low >> 4), dim=2), 2, (4, 32)) | (high & 3) << 4
    scales = blocks[:, 192:208].contiguous().view(torch.int8)
    return q.view(torch.int8) - 32, NestedScales(scales, stored_half(blocks, 208)), None


_DECODERS: Mapping[str, Callable[[Tensor], Parts]] = {
    "q8_0": _q8_0, "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1,
    "q2_k": _q2_k, "q3_k": _q3_k, "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k, **ggml_codebooks.DECODERS,
}  # fmt: skip
assert set(_DECODERS) == set(BLOCK_TYPES)


def decode_rows(raw: Tensor, name: str) -> QuantizedWeight:
    """``raw [rows, bytes per row]`` of format ``name`` → the exchange form of those rows."""
    kind = BLOCK_TYPES[name]
    rows = raw.shape[0]
    q, scale, offset = _DECODERS[name](raw.reshape(-1, kind.block_bytes))
    if isinstance(scale, NestedScales):
        return QuantizedWeight.of_nested(
            kind.held, q.reshape(rows, -1), scale.each(lambda t: t.reshape(rows, -1))
        )
    offset = None if offset is None else offset.reshape(rows, -1)
    return QuantizedWeight(kind.held, q.reshape(rows, -1), scale.reshape(rows, -1), offset)


def decode_mxfp4(blocks: Tensor, exponents: Tensor) -> QuantizedWeight:
    """``blocks [rows, groups, 16]`` and ``exponents [rows, groups]`` of gpt-oss → the exchange form of those rows."""
    q, scale = ggml_codebooks.mxfp4_in_order(blocks.reshape(-1, 16), exponents.reshape(-1))
    rows = blocks.shape[0]
    return QuantizedWeight(BLOCK_TYPES["mxfp4"].held, q.reshape(rows, -1), scale.reshape(rows, -1))
