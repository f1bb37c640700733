"""Integers on the grid of a GGUF type → the bytes of its blocks: the inverse of `quire.quant.ggml_blocks`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from quire.families.gguf_types import BLOCK_TYPES
from quire_lab.quantize.grid import Rounded


def block_bytes(rounded: Rounded) -> Tensor:
    """Return the rows of the matrix as a GGUF file has them, uint8 ``[out, bytes per row]``."""
    name = rounded.scheme.block
    assert name is not None
    kind = BLOCK_TYPES[name]
    q = rounded.q.reshape(-1, kind.block)
    packed = _PACKERS[name](q, rounded)
    assert packed.shape == (len(q), kind.block_bytes), (name, packed.shape)
    return packed.view(len(rounded.q), -1)


def _half(numbers: Tensor) -> Tensor:
    """One fp16 per block, as bytes ``[blocks, 2]``."""
    return numbers.half().reshape(-1, 1).contiguous().view(torch.uint8)


def _nibbles(numbers: Tensor) -> Tensor:
    """``[…, n]`` from 0 to 15 → ``[…, n / 2]`` bytes: the first half of the numbers lies in the low bits."""
    low, high = numbers.chunk(2, dim=-1)
    return low | high << 4


def _bits(numbers: Tensor) -> Tensor:
    """``[…, 8 · n]`` of 0 and 1 → ``[…, n]`` bytes, the first number in the lowest bit."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (torch.unflatten(numbers, -1, (-1, 8)) << shifts).sum(-1).to(torch.uint8)


def _q8_0(q: Tensor, rounded: Rounded) -> Tensor:
    return torch.cat((_half(rounded.grid.scale), q.contiguous().view(torch.uint8)), 1)


def _offset(rounded: Rounded) -> Tensor:
    assert rounded.grid.offset is not None
    return _half(rounded.grid.offset)


def _four(q: Tensor, rounded: Rounded) -> Tensor:
    """Q4_0, Q4_1 and IQ4_NL."""
    heads = [_half(rounded.grid.scale)] + ([] if rounded.scheme.symmetric else [_offset(rounded)])
    return torch.cat((*heads, _nibbles((q - rounded.scheme.lowest).to(torch.uint8))), 1)


def _five(q: Tensor, rounded: Rounded) -> Tensor:
    """Q5_0 and Q5_1."""
    u = (q - rounded.scheme.lowest).to(torch.uint8)
    heads = [_half(rounded.grid.scale)] + ([] if rounded.scheme.symmetric else [_offset(rounded)])
    return torch.cat((*heads, _bits(u >> 4), _nibbles(u & 15)), 1)


def _k_head(rounded: Rounded) -> Tensor:
    """d, d_min and eight scales and mins of 6 bits in 12 bytes, of Q4_K and Q5_K."""
    nested = rounded.grid.nested
    assert nested is not None
    assert nested.d_min is not None
    assert nested.mins is not None
    scales, mins = (t.reshape(-1, 8).to(torch.uint8) for t in (nested.codes, nested.mins))
    low = scales[:, :4] | scales[:, 4:] >> 4 << 6
    mid = mins[:, :4] | mins[:, 4:] >> 4 << 6
    high = scales[:, 4:] & 15 | (mins[:, 4:] & 15) << 4
    return torch.cat((_half(nested.d), _half(nested.d_min), low, mid, high), 1)


def _pairs(u: Tensor) -> Tensor:
    """``[blocks, 8, 32]`` from 0 to 15 → 128 bytes: each 32 hold one group in their low and one in their high bits."""
    pairs = torch.unflatten(u, 1, (4, 2))
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)


def _q4_k(q: Tensor, rounded: Rounded) -> Tensor:
    return torch.cat((_k_head(rounded), _pairs(q.to(torch.uint8).view(-1, 8, 32))), 1)


def _q5_k(q: Tensor, rounded: Rounded) -> Tensor:
    u = q.to(torch.uint8).view(-1, 8, 32)
    high = _bits((u >> 4).transpose(1, 2).flatten(1))
    return torch.cat((_k_head(rounded), high, _pairs(u & 15)), 1)


def _q6_k(q: Tensor, rounded: Rounded) -> Tensor:
    nested = rounded.grid.nested
    assert nested is not None
    u = (q + 32).to(torch.uint8).view(-1, 2, 4, 32)
    low = torch.stack((u[:, :, 0] & 15 | (u[:, :, 2] & 15) << 4, u[:, :, 1] & 15 | (u[:, :, 3] & 15) << 4), 2)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
    high = ((u >> 4) << shifts).sum(2).to(torch.uint8)
    scales = nested.codes.reshape(-1, 16).to(torch.int8).view(torch.uint8)
    return torch.cat((low.flatten(1), high.flatten(1), scales, _half(nested.d)), 1)


def _iq4_xs(q: Tensor, rounded: Rounded) -> Tensor:
    nested = rounded.grid.nested
    assert nested is not None
    codes = (nested.codes.reshape(-1, 8) + 32).to(torch.uint8)
    low = codes[:, ::2] & 15 | (codes[:, 1::2] & 15) << 4
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    high = (torch.unflatten(codes >> 4, 1, (2, 4)) << shifts).sum(-1).to(torch.uint8)
    return torch.cat((_half(nested.d), high, low, _nibbles(q.to(torch.uint8).view(-1, 8, 32)).flatten(1)), 1)


_PACKERS: Mapping[str, Callable[[Tensor, Rounded], Tensor]] = {
    "q8_0": _q8_0, "q4_0": _four, "q4_1": _four, "iq4_nl": _four, "q5_0": _five, "q5_1": _five,
    "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k, "iq4_xs": _iq4_xs,
}  # fmt: skip
