"""Quantized matrices of a checkpoint, decoded range by range while they are packed, and the int32 words that hold many.

AutoAWQ, GPTQ and compressed-tensors pack 32 / bits unsigned numbers per word, lowest bits first (AWQ in an order of its
own). Zero points are packed alike. Of 3 bits compressed-tensors has 10 in a word.

    compressed-tensors   words along the inputs [out, in / 8], zero points along the outputs [out / 8, groups]
    gptq                 words along the inputs [in / 8, out], zero points along the outputs [groups, out / 8]
    awq                  words along the outputs [in, out / 8], zero points the same [groups, out / 8]
    awq "gemv"           words along the inputs [out, in / 8], zero points along the groups [out, groups / 8, padded]

Sources: AutoGPTQ's ``QuantLinear.pack``, AutoAWQ's ``WQLinear_GEMM`` and ``WQLinear_GEMV``, compressed-tensors'
``pack_quantized``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

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
    """One quantized matrix ``[out, in]``; ``read(start, stop)`` decodes those rows.

    ``plain``: the rows as the file means them, fp32, where ``read`` rounds them again.
    """

    format: WeightFormat
    shape: tuple[int, int]
    read: Callable[[int, int], QuantizedWeight]
    plain: Callable[[int, int], Tensor] | None = None

    def ranges(self) -> Iterator[tuple[int, QuantizedWeight]]:
        """Yield (first row, rows) over the whole matrix."""
        for start, stop in row_ranges(*self.shape):
            yield start, self.read(start, stop)

    def rows(self, part: range | None) -> StoredMatrix:
        """Return the matrix of these output features; None is all of them."""
        if part is None:
            return self
        first, read, plain = part.start, self.read, self.plain
        return StoredMatrix(
            self.format,
            (len(part), self.shape[1]),
            lambda start, stop: read(first + start, first + stop),
            None if plain is None else lambda start, stop: plain(first + start, first + stop),
        )

    def in_pieces(self, pieces: tuple[range, ...]) -> StoredMatrix:
        """Return the matrix of these ranges of output features, one after the other; none: all as they are."""
        if not pieces:
            return self

        def read(start: int, stop: int) -> QuantizedWeight:
            parts, first = [], 0
            for piece in pieces:
                begin, end = max(start - first, 0), min(stop - first, len(piece))
                if begin < end:
                    parts.append(self.read(piece.start + begin, piece.start + end))
                first += len(piece)
            offsets = [part.offset for part in parts if part.offset is not None]
            return QuantizedWeight(
                self.format,
                torch.cat([part.q for part in parts]),
                torch.cat([part.scale for part in parts]),
                torch.cat(offsets) if offsets else None,
            )

        return StoredMatrix(self.format, (sum(map(len, pieces)), self.shape[1]), read)

    def expand(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix as plain numbers."""
        out = torch.empty(self.shape, dtype=dtype)
        for start, stop in row_ranges(*self.shape):
            plain = None if self.plain is None else self.plain(start, stop)
            out[start:stop] = dequantize(self.read(start, stop)) if plain is None else plain
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
    """Return the inputs ``columns``, whole groups, of ``weight``: where it is cut, in the format's `wide` form."""
    if len(columns) == weight.shape[1]:
        return weight
    weight = weight.widened(weight.format.wide)
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
    """``[rows, n]`` int32 → ``[rows, n · (32 // bits)]`` uint8."""
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
    kind: Kind = "int4" if bits <= 4 else "int8"
    group = None if scale.shape[1] == 1 else q.shape[1] // scale.shape[1]
    stored = QuantizedWeight(WeightFormat(kind, group, held.has_offset), signed, scale, offset)
    return regroup(stored, held)
