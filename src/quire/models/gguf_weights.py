"""Matrices in ggml's blocks, or in those of gpt-oss: the mapped bytes, or one range of them per expert, as a matrix
that decodes rows on demand.

Scales are checked as rows are decoded, before a row is packed: one that is not finite would turn every answer that it
touches into an error. MXFP4's scales are powers of two from 2⁻¹²⁸ to 2¹²⁶, and a row is held as fp16 numbers times one
power of two: the smallest and the largest scale of a row may differ by 2³⁸, more than they do in any trained model.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.families.gguf_types import BLOCK_TYPES
from quire.kernels.linear.packed import QuantizedWeight
from quire.models.safetensors_file import AGAIN, StoredTensor
from quire.parallel.shard import Cut
from quire.quant.ggml_blocks import decode_mxfp4, decode_rows
from quire.quant.stored import StoredMatrix, StoredStack, take_columns
from quire.weight_format import WeightFormat

WIDEST = 2.0**38  # largest scale of a row over its smallest
FARTHEST = 2.0**112  # largest scale, and one over the smallest of the largest


def open_blocks(
    name: str, stored: StoredTensor, raw: Tensor, order: Tensor | None, held: WeightFormat, cut: Cut
) -> StoredMatrix | StoredStack:
    """Return the part ``cut`` of the matrix ``raw [out, bytes]``, or of the stack ``[experts, out, bytes]``.

    ``order``: the stored row of each output feature; None leaves them as they are. Errors name ``name`` and the file.
    """
    if raw.dim() == 3:
        experts = range(len(raw)) if cut.experts is None else cut.experts
        return StoredStack(
            tuple(_matrix(f"{name}, expert {e}", stored, raw[e], order, held, cut) for e in experts)
        )
    return _matrix(name, stored, raw, order, held, cut)


def _matrix(
    name: str, stored: StoredTensor, raw: Tensor, order: Tensor | None, held: WeightFormat, cut: Cut
) -> StoredMatrix:
    block, columns = BLOCK_TYPES[stored.dtype], cut.columns or range(stored.shape[-1])
    first, last = columns.start // block.block, -(-columns.stop // block.block)
    raw = raw[:, first * block.block_bytes : last * block.block_bytes]
    within = range(columns.start - first * block.block, columns.stop - first * block.block)

    def read(start: int, stop: int) -> QuantizedWeight:
        rows = raw[start:stop] if order is None else raw[order[start:stop]]
        weight = decode_rows(rows, stored.dtype)
        _check_scales(weight, name, stored.dtype, stored.file, start)
        return take_columns(weight, within)

    return StoredMatrix(held, (len(raw if order is None else order), len(columns)), read).rows(cut.rows)


def open_pieces(
    name: str, stored: StoredTensor, raw: Tensor, pieces: tuple[range, ...], held: WeightFormat, cut: Cut
) -> StoredMatrix:
    """Return the part ``cut`` of the matrix whose inputs are those of ``pieces``, one after the other, in ``held``.

    ``held`` is the `WeightFormat.wide` form of the blocks: a piece is some of their groups, and no whole blocks.
    """
    order = torch.cat([torch.arange(piece.start, piece.stop) for piece in pieces])
    columns = cut.columns or range(len(order))
    order = order[columns.start : columns.stop]
    group = held.group or len(order)
    if any(edge % group for piece in pieces for edge in (piece.start, piece.stop)) or columns.start % group:
        raise UnsupportedModelError(
            f"{stored.file}: {name} has blocks with a scale for {group} inputs, and its heads begin within them; take "
            "a file of another type, or fewer tensor-parallel ranks."
        )
    groups = order[::group] // group

    def read(start: int, stop: int) -> QuantizedWeight:
        weight = decode_rows(raw[start:stop], stored.dtype)
        _check_scales(weight, name, stored.dtype, stored.file, start)
        wide = weight.widened(held)
        offset = None if wide.offset is None else wide.offset[:, groups]
        return QuantizedWeight(held, wide.q[:, order], wide.scale[:, groups], offset)

    return StoredMatrix(held, (len(raw), len(order)), read).rows(cut.rows)


def open_mxfp4(
    name: str, stored: StoredTensor, blocks: Tensor, scales: Tensor, held: WeightFormat, cut: Cut
) -> StoredStack:
    """Return the experts of gpt-oss: ``blocks [experts, out, groups, 16]``, ``scales [experts, out, groups]``."""

    def matrix(e: int) -> StoredMatrix:
        shape = blocks.shape[1], blocks.shape[2] * 32

        def read(start: int, stop: int) -> QuantizedWeight:
            weight = decode_mxfp4(blocks[e, start:stop], scales[e, start:stop])
            _check_scales(weight, f"{name}, expert {e}", "mxfp4", stored.file, start)
            return take_columns(weight, cut.columns or range(shape[1]))

        return StoredMatrix(held, (shape[0], len(cut.columns or range(shape[1]))), read).rows(cut.rows)

    experts = range(len(blocks)) if cut.experts is None else cut.experts
    return StoredStack(tuple(matrix(e) for e in experts))


def _check_scales(weight: QuantizedWeight, name: str, kind: str, file: Path, start: int) -> None:
    finite = torch.isfinite(weight.scale).all(1)
    if weight.offset is not None:
        finite &= torch.isfinite(weight.offset).all(1)
    if not finite.all():
        row = start + int((~finite).nonzero()[0])
        raise ModelLoadError(
            f"{file}: {name} ({kind.upper()}) has a scale that is not a finite number in row {row}; {AGAIN}."
        )
    if kind != "mxfp4":
        return
    largest = weight.scale.amax(1)
    smallest = torch.where(weight.scale > 0, weight.scale, torch.inf).amin(1)
    beyond = (largest > 0) & ((largest / WIDEST > smallest) | (largest > FARTHEST) | (largest < 1 / FARTHEST))
    if beyond.any():
        row = start + int(beyond.nonzero()[0])
        raise UnsupportedModelError(
            f"{file}: {name} (MXFP4) has scales from {float(smallest[row - start]):.1e} to "
            f"{float(largest[row - start]):.1e} in row {row}, more than the kernels hold in one row (a factor of 2³⁸); "
            "no trained model has that: download the file again."
        )
