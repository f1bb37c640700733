"""ggml's block types whose bits choose numbers from a table: IQ1 … IQ4, TQ and MXFP4, decoded without loss.

``blocks [n, bytes per block]`` uint8 becomes integers ``[n, weights]`` int8, scales and maybe offsets ``[n, groups]``
fp32. d is a float16. An index picks 4 or 8 numbers at once from a grid (``iq_grids.toml``). Their signs are bits of
their own, or 7 bits whose parity is the eighth.

    IQ4_NL   d, 16 bytes                                     w = d · table[q]             32 weights, low halves first
    MXFP4    e, 16 bytes                                     w = 2^(e − 128) · table[q]   the same
    IQ4_XS   d, 8 scales of 6 bits, 128 bytes                w = d · (scale − 32) · table[q]
    IQ2_XXS  d, 8 × (4 indices, 4 × 7 signs, scale)          w = d · (scale + ½) / 4 · ± grid
    IQ2_XS   d, 32 × (index of 9 bits, 7 signs), 16 scales   the same
    IQ2_S    d, 32 indices of 10 bits, signs, 16 scales      the same
    IQ3_XXS  d, 64 indices, 8 × (4 × 7 signs, scale)         w = d · (scale + ½) / 2 · ± grid
    IQ3_S    d, 64 indices of 9 bits, signs, 8 scales        w = d · (2 · scale + 1) · ± grid
    IQ1_S    d, 32 indices of 11 bits, 8 × (sign, scale)     w = d · (2 · scale + 1) · (grid ± ⅛)
    IQ1_M    32 indices of 11 bits, 32 signs, 16 scales, d   the same
    TQ1_0    five numbers per byte in base 3, d              w = d · (q − 1)
    TQ2_0    64 bytes, d                                     w = d · (q − 1)

All but the first two have 256 weights. Sources: llama.cpp's ``ggml-common.h`` and ``ggml-quants.c``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files

import torch
from torch import Tensor

from quire.kernels.linear.packed import NestedScales

# Integers, scales and offsets; nested scales bring their offsets.
Parts = tuple[Tensor, Tensor | NestedScales, Tensor | None]

IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# FP4 (E2M1) doubled, by its four bits.
FP4_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte ``at`` of each block, as fp32 ``[n, 1]``."""
    return stored_half(blocks, at).float()


def stored_half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte ``at`` of each block, ``[n, 1]``."""
    return _aligned(blocks[:, at : at + 2]).view(torch.float16)


def _aligned(data: Tensor) -> Tensor:
    """Copy, where `contiguous` would keep the odd address of a single block."""
    return data.clone(memory_format=torch.contiguous_format)


def halves(data: Tensor) -> Tensor:
    """``[n, bytes]`` → ``[n, 2 · bytes]`` uint8: all low halves, then all high halves."""
    return torch.cat((data & 15, data >> 4), dim=-1)


def bits(data: Tensor, width: int) -> Tensor:
    """``[n, bytes]`` → ``[n, bytes, 8 / width]``: the numbers of ``width`` bits in each byte, lowest first."""
    return data.unsqueeze(-1) >> torch.arange(0, 8, width, dtype=torch.uint8) & (1 << width) - 1


def planes(data: Tensor) -> Tensor:
    """64 bytes → ``[n, 256]``: each 32 bytes hold four runs of 32 numbers, in their bits 0-1, 2-3, 4-5 and 6-7."""
    return bits(torch.unflatten(data, 1, (2, 32)), 2).transpose(2, 3).flatten(1)


def _words(blocks: Tensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Return the little-endian numbers at the bytes ``start … stop − 1``, ``[n, numbers]`` int32."""
    return _aligned(blocks[:, start:stop]).view(dtype).int()


@cache
def _grid(name: str) -> Tensor:
    """Return the vectors of a grid, ``[indices, 4 or 8]`` int8."""
    entry = tomllib.loads((files("quire.quant") / "iq_grids.toml").read_text(encoding="utf-8"))[name]
    levels = torch.tensor(entry["levels"], dtype=torch.int8)
    packed = torch.frombuffer(bytearray.fromhex(entry["packed"]), dtype=torch.uint8)
    return levels[bits(packed, 2 if len(levels) < 4 else 4).flatten().int()].view(-1, entry["width"])


def _from_grid(name: str, index: Tensor) -> Tensor:
    """``index [n, vectors]`` → ``[n, vectors · width]`` int8."""
    return _grid(name)[index.int()].flatten(1)


def _signs(data: Tensor) -> Tensor:
    """``[n, bytes]`` → ``[n, 8 · bytes]``: 1, or −1 where the bit is set."""
    return 1 - 2 * bits(data, 1).flatten(1).view(torch.int8)


def _signs_of_7(index: Tensor) -> Tensor:
    """``[n, vectors]`` numbers of 7 bits → ``[n, 8 · vectors]``: the eighth sign makes the number of −1 even."""
    parity = index ^ index >> 4
    parity = parity ^ parity >> 2
    parity = (parity ^ parity >> 1) & 1
    return _signs((index | parity << 7).to(torch.uint8))


def _table(levels: tuple[int, ...], codes: Tensor) -> Tensor:
    return torch.tensor(levels, dtype=torch.int8)[codes.int()]


def _iq4_nl(blocks: Tensor) -> Parts:
    return _table(IQ4_LEVELS, halves(blocks[:, 2:])), half(blocks, 0), None


def _mxfp4(blocks: Tensor) -> Parts:
    q = _table(FP4_LEVELS, halves(blocks[:, 1:]))
    return q, half_powers(blocks[:, :1], q), None


def half_powers(exponents: Tensor, q: Tensor) -> Tensor:
    """Half of MXFP4's scales, 2^(e − 128), fp32 ``[n, 1]``, for the doubled numbers ``q [n, 32]`` of a block."""
    e = exponents.int()
    # The bits of 2^(e − 128); the two smallest are subnormal numbers.
    powers = torch.where(e < 2, 0x0020_0000 << e, e - 1 << 23).view(torch.float32)
    scale = torch.where(e == 255, torch.nan, powers)
    # Quantizers give a block of zeros the smallest scale, which would widen the range of its row.
    return torch.where(q.any(1, keepdim=True), scale, 0.0)


def mxfp4_in_order(blocks: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """Integers and scales of gpt-oss's blocks ``[n, 16]``, whose bytes hold neighbours, the lower half first."""
    q = _table(FP4_LEVELS, torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1))
    return q, half_powers(exponents.unsqueeze(1), q)


def _iq4_xs(blocks: Tensor) -> Parts:
    low = bits(blocks[:, 4:8], 4).flatten(1)
    high = bits(blocks[:, 2:4], 2).flatten(1)
    scales = (low | high << 4).view(torch.int8) - 32
    q = _table(IQ4_LEVELS, halves(torch.unflatten(blocks[:, 8:], 1, (8, 16))).flatten(1))
    return q, NestedScales(scales, stored_half(blocks, 0)), None


def _iq2_xxs(blocks: Tensor) -> Parts:
    words = _words(blocks, 2, 66, torch.int32)[:, 1::2].unsqueeze(2)
    index = torch.unflatten(blocks[:, 2:], 1, (8, 8))[:, :, :4].flatten(1)
    q = _from_grid("iq2_xxs", index) * _signs_of_7(_sevens(words))
    return q, half(blocks, 0) * ((words >> 28 & 15).flatten(1) + 0.5) * 0.25, None


def _sevens(words: Tensor) -> Tensor:
    """``[n, words, 1]`` int32 → ``[n, 4 · words]``: the lower four numbers of 7 bits."""
    return (words >> torch.tensor([0, 7, 14, 21], dtype=torch.int32) & 127).flatten(1)


def _iq2_scales(blocks: Tensor, packed: Tensor) -> Tensor:
    return half(blocks, 0) * (bits(packed, 4).flatten(1) + 0.5) * 0.25


def _iq2_xs(blocks: Tensor) -> Parts:
    words = _words(blocks, 2, 66, torch.int16)
    q = _from_grid("iq2_xs", words & 511) * _signs_of_7(words >> 9 & 127)
    return q, _iq2_scales(blocks, blocks[:, 66:]), None


def _iq2_s(blocks: Tensor) -> Parts:
    index = blocks[:, 2:34].int() | bits(blocks[:, 66:74], 2).flatten(1).int() << 8
    q = _from_grid("iq2_s", index) * _signs(blocks[:, 34:66])
    return q, _iq2_scales(blocks, blocks[:, 74:]), None


def _iq3_xxs(blocks: Tensor) -> Parts:
    words = _words(blocks, 66, 98, torch.int32).unsqueeze(2)
    q = _from_grid("iq3_xxs", blocks[:, 2:66]) * _signs_of_7(_sevens(words))
    return q, half(blocks, 0) * ((words >> 28 & 15).flatten(1) + 0.5) * 0.5, None


def _iq3_s(blocks: Tensor) -> Parts:
    index = blocks[:, 2:66].int() | bits(blocks[:, 66:74], 1).flatten(1).int() << 8
    odd = _from_grid("iq3_s", index) * _signs(blocks[:, 74:106])
    scale = half(blocks, 0) * (2 * bits(blocks[:, 106:], 4).flatten(1).float() + 1)
    return odd - 1 >> 1, 2 * scale, scale  # −15, −13 … 15 as four bits: 2 · q + 1


def _iq1_s(blocks: Tensor) -> Parts:
    words = _words(blocks, 34, 50, torch.int16)
    high = words.unsqueeze(2) >> torch.tensor([0, 3, 6, 9], dtype=torch.int32) & 7
    index = blocks[:, 2:34].int() | high.flatten(1) << 8
    scale = half(blocks, 0) * (2 * (words >> 12 & 7) + 1)
    return _from_grid("iq1", index), scale, scale * torch.where(words < 0, -0.125, 0.125)


def _iq1_m(blocks: Tensor) -> Parts:
    high = bits(blocks[:, 32:48], 4).flatten(1).int()
    words = _words(blocks, 48, 56, torch.int16)
    nibbles = (words >> 12 & 15) << torch.tensor([0, 4, 8, 12], dtype=torch.int32)
    d = nibbles.sum(1, dtype=torch.int32).to(torch.int16).view(torch.float16).float().unsqueeze(1)
    scales = (words.unsqueeze(2) >> torch.tensor([0, 3, 6, 9], dtype=torch.int32) & 7).flatten(1)
    eights = _from_grid("iq1", blocks[:, :32].int() | (high & 7) << 8) * 8
    delta = (1 - 2 * (high >> 3 & 1)).to(torch.int8).repeat_interleave(8, 1)
    return eights + delta, d * (2 * scales + 1) * 0.125, None


def _base_3(data: Tensor, count: int) -> Tensor:
    """``[n, bytes]`` → ``[n, count · bytes]``: the first digits of all bytes, then the second …, less 1."""
    powers = torch.tensor([3**i for i in range(count)], dtype=torch.uint8).unsqueeze(1)
    digits = (data.unsqueeze(1) * powers).short() * 3 >> 8
    return digits.to(torch.int8).flatten(1) - 1


def _tq1_0(blocks: Tensor) -> Parts:
    q = (_base_3(blocks[:, :32], 5), _base_3(blocks[:, 32:48], 5), _base_3(blocks[:, 48:52], 4))
    return torch.cat(q, 1), half(blocks, 52).expand(-1, 4), None


def _tq2_0(blocks: Tensor) -> Parts:
    return planes(blocks[:, :64]).view(torch.int8) - 1, half(blocks, 64).expand(-1, 4), None


DECODERS: Mapping[str, Callable[[Tensor], Parts]] = {
    "iq4_nl": _iq4_nl, "iq4_xs": _iq4_xs, "mxfp4": _mxfp4, "iq2_xxs": _iq2_xxs, "iq2_xs": _iq2_xs, "iq2_s": _iq2_s,
    "iq3_xxs": _iq3_xxs, "iq3_s": _iq3_s, "iq1_s": _iq1_s, "iq1_m": _iq1_m, "tq1_0": _tq1_0, "tq2_0": _tq2_0,
}  # fmt: skip
