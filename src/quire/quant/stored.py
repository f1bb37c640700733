"""Quantized matrices of a checkpoint, decoded range by range while they are packed, and the int32 words that hold many.

AutoAWQ, GPTQ and compressed-tensors pack 32 / bits unsigned numbers per word, lowest bits first (AWQ in an order of its
own). Zero points are packed alike.

    compressed-tensors   words along the inputs [out, in / 8], zero points along the outputs [out / 8, groups]
    gptq                 words along the inputs [in / 8, out], zero points along the outputs [groups, out / 8]
    awq                  words along the outputs [in, out / 8], zero points the same [groups, out / 8]

Sources: AutoGPTQ's ``QuantLinear.pack``, AutoAWQ's ``WQLinear_GEMM``, compressed-tensors' ``pack_quantized``.

ggml's block formats become integers, scales and offsets without loss (llama.cpp's ``ggml-common.h``). A block holds 32
weights of a row, or (the K formats) 256 in 8 or 16 groups. ``raw [rows, bytes per row]`` uint8.

    Q8_0  d, 32 int8                        w = d · q
    Q4_0  d, 16 bytes                       w = d · (q − 8)          low halves first, then high halves
    Q4_1  d, m, 16 bytes                    w = d · q + m
    Q5_0  d, 32 high bits, 16 bytes         w = d · (q − 16)
    Q5_1  d, m, 32 high bits, 16 bytes      w = d · q + m
    Q4_K  d, dmin, 8 × (scale, min) of 6 bits, 128 bytes                  w = d · scale · q − dmin · min
    Q5_K  the same with 32 bytes of high bits before the 128
    Q6_K  128 bytes, 64 bytes of high bits, 16 int8 scales, d             w = d · scale · (q − 32)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.families.gguf_types import BLOCK_TYPES
from quire.kernels.linear import reference
from quire.kernels.linear.packed import QuantizedWeight
from quire.weight_format import Kind, WeightFormat

CHUNK = 1 << 19  # weights decoded at once: fp32 copies of them stay in a cache
DEVICE_CHUNK = 1 << 24  # weights per pass on a GPU: a pass is hundreds of launches


def row_ranges(num_rows: int, num_columns: int, chunk: int = CHUNK) -> Iterator[tuple[int, int]]:
    """Cut the rows of a matrix into ranges of about ``chunk`` weights, a multiple of 32 rows each but the last."""
    step = max(32, chunk // max(1, num_columns) // 32 * 32)
    for start in range(0, num_rows, step):
        yield start, min(num_rows, start + step)


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """One quantized matrix ``[out, in]``; ``read(start, stop)`` decodes those rows."""

    format: WeightFormat
    shape: tuple[int, int]
    read: Callable[[int, int], QuantizedWeight]

    def ranges(self) -> Iterator[tuple[int, QuantizedWeight]]:
        """Yield (first row, rows) over the whole matrix."""
        for start, stop in row_ranges(*self.shape):
            yield start, self.read(start, stop)

    def rows(self, part: range | None) -> StoredMatrix:
        """Return the matrix of these output features; None is all of them."""
        if part is None:
            return self
        first, read = part.start, self.read
        shape = len(part), self.shape[1]
        return StoredMatrix(self.format, shape, lambda start, stop: read(first + start, first + stop))

    def expand(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix as plain numbers."""
        out = torch.empty(self.shape, dtype=dtype)
        for start, rows in self.ranges():
            out[start : start + rows.shape[0]] = dequantize(rows)
        return out


@dataclass(frozen=True, slots=True)
class StoredStack:
    """The matrices of all experts, ``[experts, out, in]``."""

    matrices: tuple[StoredMatrix, ...]

    @property
    def format(self) -> WeightFormat:
        return self.matrices[0].format

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.matrices), *self.matrices[0].shape

    def expand(self, dtype: torch.dtype) -> Tensor:
        return torch.stack([matrix.expand(dtype) for matrix in self.matrices])


Weight = Tensor | StoredMatrix | StoredStack


def dequantize(weight: QuantizedWeight) -> Tensor:
    """Return fp32 ``[out, in]``: scale · q + offset."""
    group = weight.shape[1] // weight.scale.shape[1]
    return reference.dequantize(weight.integers, weight.scale, weight.offset, group)


def take_columns(weight: QuantizedWeight, columns: range) -> QuantizedWeight:
    """Return the inputs ``columns``, whole groups, of ``weight``."""
    if len(columns) == weight.shape[1]:
        return weight
    group = weight.shape[1] // weight.scale.shape[1]
    assert columns.start % group == 0, (columns, group)
    inputs = slice(columns.start, columns.stop)
    groups = slice(columns.start // group, -(-columns.stop // group))
    offset = None if weight.offset is None else weight.offset[:, groups]
    return QuantizedWeight(weight.format, weight.q[:, inputs], weight.scale[:, groups], offset)


def regroup(weight: QuantizedWeight, held: WeightFormat) -> QuantizedWeight:
    """Return the same numbers under ``held``, whose groups divide those of ``weight``: scales are repeated."""
    groups = 1 if held.group is None else weight.q.shape[1] // held.group
    times, rest = divmod(groups, weight.scale.shape[1])
    assert rest == 0, (weight.scale.shape, held)
    if times == 1:
        return QuantizedWeight(held, weight.q, weight.scale, weight.offset)
    offset = None if weight.offset is None else weight.offset.repeat_interleave(times, 1)
    return QuantizedWeight(held, weight.q, weight.scale.repeat_interleave(times, 1), offset)


AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # place in the word of the outputs 8i, 8i + 1, …


def unpack(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """``[rows, n]`` int32 → ``[rows, n · 32 / bits]`` uint8."""
    count = 32 // bits
    places = torch.tensor(order or range(count), dtype=torch.int32) * bits
    return (words.unsqueeze(-1) >> places & (1 << bits) - 1).flatten(1).to(torch.uint8)


def exchange(q: Tensor, scale: Tensor, zero: Tensor | None, bits: int, held: WeightFormat) -> QuantizedWeight:
    """Unsigned ``q [out, in]``, ``scale`` and ``zero [out, groups]`` (None: the middle) → ``held``.

    w = scale · (q − zero), and with q′ = q − middle: scale · q′ + scale · (middle − zero).
    """
    middle = 1 << bits - 1
    signed = (q.to(torch.int16) - middle).to(torch.int8)
    scale = scale.float()
    offset = None
    if zero is not None:
        offset = scale * (middle - zero.float())
    elif held.has_offset:
        offset = torch.zeros_like(scale)
    kind: Kind = "int4" if bits == 4 else "int8"
    group = None if scale.shape[1] == 1 else q.shape[1] // scale.shape[1]
    stored = QuantizedWeight(WeightFormat(kind, group, held.has_offset), signed, scale, offset)
    return regroup(stored, held)


Parts = tuple[Tensor, Tensor, Tensor | None]  # q, scale, offset; each [blocks, groups, ...]


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte ``at`` of each block, as fp32 ``[blocks, 1]``."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _halves(data: Tensor) -> Tensor:
    """``[blocks, n]`` bytes → ``[blocks, 2 · n]`` int8: all low halves, then all high halves."""
    return torch.cat((data & 15, data >> 4), dim=-1).view(torch.int8)


def _high_bits(blocks: Tensor, at: int) -> Tensor:
    """Four bytes from ``at``: the fifth bit (as 16) of 32 weights, ``[blocks, 32]`` int8."""
    shifts = torch.arange(8, dtype=torch.uint8)
    bits = blocks[:, at : at + 4].unsqueeze(-1) >> shifts & 1
    return (bits.flatten(1) << 4).view(torch.int8)


def _q8_0(blocks: Tensor) -> Parts:
    return blocks[:, 2:].contiguous().view(torch.int8), _half(blocks, 0), None


def _q4_0(blocks: Tensor) -> Parts:
    return _halves(blocks[:, 2:]) - 8, _half(blocks, 0), None


def _q4_1(blocks: Tensor) -> Parts:
    scale = _half(blocks, 0)
    return _halves(blocks[:, 4:]) - 8, scale, scale * 8 + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Parts:
    return (_halves(blocks[:, 6:]) | _high_bits(blocks, 2)) - 16, _half(blocks, 0), None


def _q5_1(blocks: Tensor) -> Parts:
    q = _halves(blocks[:, 8:]) | _high_bits(blocks, 4)
    return q, _half(blocks, 0), _half(blocks, 2)


def _scales_and_mins(packed: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes → 8 scales and 8 mins of 6 bits, fp32: the upper two bits of the last four lie over the first four."""
    low, mid, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((low & 63, high & 15 | (low >> 6) << 4), dim=1)
    mins = torch.cat((mid & 63, high >> 4 | (mid >> 6) << 4), dim=1)
    return scales.float(), mins.float()


def _k_affine(blocks: Tensor, q: Tensor, zero: int) -> Parts:
    """Scales and offsets of Q4_K and Q5_K for ``q [blocks, 8, 32]`` from which ``zero`` was taken."""
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    scale = _half(blocks, 0) * scales
    return q, scale, scale * zero - _half(blocks, 2) * mins


def _pairs_of_32(data: Tensor) -> Tensor:
    """128 bytes → ``[blocks, 8, 32]``: each 32 bytes hold one group in their low and one in their high halves."""
    parts = torch.unflatten(data, 1, (4, 32))
    return torch.stack((parts & 15, parts >> 4), dim=2).flatten(1, 2)


def _q4_k(blocks: Tensor) -> Parts:
    return _k_affine(blocks, _pairs_of_32(blocks[:, 16:]).view(torch.int8) - 8, 8)


def _q5_k(blocks: Tensor) -> Parts:
    shifts = torch.arange(8, dtype=torch.uint8).unsqueeze(1)
    high = blocks[:, 16:48].unsqueeze(1) >> shifts & 1  # bit g of byte k belongs to group g
    return _k_affine(blocks, (_pairs_of_32(blocks[:, 48:]) | high << 4).view(torch.int8), 0)


def _q6_k(blocks: Tensor) -> Parts:
    low = torch.unflatten(blocks[:, :128], 1, (2, 64))  # two halves of 128 weights
    shifts = torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8)
    high = torch.unflatten(blocks[:, 128:192], 1, (2, 1, 32)) >> shifts
    q = torch.unflatten(torch.cat((low & 15, low >> 4), dim=2), 2, (4, 32)) | (high & 3) << 4
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return q.view(torch.int8) - 32, _half(blocks, 208) * scales, None


_DECODERS: Mapping[str, Callable[[Tensor], Parts]] = {
    "q8_0": _q8_0, "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1,
    "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k,
}  # fmt: skip
assert set(_DECODERS) == set(BLOCK_TYPES)


def decode_rows(raw: Tensor, name: str) -> QuantizedWeight:
    """``raw [rows, bytes per row]`` of format ``name`` → the exchange form of those rows."""
    kind = BLOCK_TYPES[name]
    rows = raw.shape[0]
    q, scale, offset = _DECODERS[name](raw.reshape(-1, kind.block_bytes))
    offset = None if offset is None else offset.reshape(rows, -1)
    return QuantizedWeight(kind.held, q.reshape(rows, -1), scale.reshape(rows, -1), offset)
