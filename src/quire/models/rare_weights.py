"""Matrices of the formats of `quire.models.rare_formats`, decoded range by range. Loaded for such a file alone.

Sources: bitsandbytes' ``dequantize_4bit`` and ``QuantState``, HQQ's ``BitPack`` and ``Quantizer.dequantize``,
compressed-tensors' ``unpack_fp4_from_uint8``, ModelOpt's ``NVFP4QTensor``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.families import Take
from quire.families.quantization_scheme import Scheme
from quire.kernels.linear.packed import QuantizedWeight
from quire.models.weight_sources import Parts
from quire.quant.rtn import quantize
from quire.quant.stored import StoredMatrix, exchange, regroup, take_columns
from quire.weight_format import WeightFormat

Tensors = Mapping[str, Tensor]
# The numbers of e2m1, doubled.
_E2M1 = torch.tensor((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), dtype=torch.int8)


def open_rare(
    take: Take, held: WeightFormat, scheme: Scheme, tensors: Tensors, names: Parts, columns: range | None, *,
    expanded: bool,
) -> StoredMatrix:  # fmt: skip
    """Return the rows of ``take``, and of them the inputs ``columns``. ``expanded``: they are rounded to ``held``.

    Raises:
        ModelLoadError, UnsupportedModelError: the tensors contradict each other or quantization_config.
    """
    _check_finite(tensors, names)
    out, in_features = take.shape
    inputs = columns or range(in_features)
    if expanded:
        plain = partial(_columns, _plain_rows(take.shape, scheme, tensors, names), inputs)
        matrix = StoredMatrix(
            held, (out, len(inputs)), lambda start, stop: quantize(plain(start, stop), held), plain
        )
    else:
        rows = _integer_rows(take.shape, held, scheme, tensors, names)
        matrix = StoredMatrix(
            held, (out, len(inputs)), lambda start, stop: take_columns(rows(start, stop), inputs)
        )
    return matrix.rows(range(take.start, out if take.stop is None else take.stop))


def _check_finite(tensors: Tensors, names: Parts) -> None:
    for part in ("scale", "zero", "levels", "scale_scale", "scale_levels"):
        if part in tensors and not bool(tensors[part].float().isfinite().all()):
            raise ModelLoadError(
                f"{names[part]} holds NaN or infinity: the file is damaged; download it again, or ask the publisher."
            )


def _columns(rows: Callable[[int, int], Tensor], inputs: range, start: int, stop: int) -> Tensor:
    return rows(start, stop)[:, inputs.start : inputs.stop]


def _plain_rows(
    shape: tuple[int, ...], scheme: Scheme, tensors: Tensors, names: Parts
) -> Callable[[int, int], Tensor]:
    """Return what decodes rows to fp32."""
    if scheme.encoding == "bnb4":
        state, absmax = _bnb4_state(tensors, names)
        return partial(_bnb4_rows, tensors, absmax, int(state["blocksize"]), shape[1])
    _check_hqq(tensors, scheme, names)
    return partial(_hqq_plain, tensors, scheme, shape)


def _integer_rows(
    shape: tuple[int, ...], held: WeightFormat, scheme: Scheme, tensors: Tensors, names: Parts
) -> Callable[[int, int], QuantizedWeight]:
    """Return what decodes rows to ``held``."""
    if scheme.encoding == "bnb8":
        _check_layout(tensors, names)
        return partial(_bnb8_rows, tensors, held)
    if scheme.encoding == "hqq":
        _check_hqq(tensors, scheme, names)
        return partial(_hqq_rows, tensors, scheme, shape, held)
    common = tensors["global"].float().reshape(())
    if not bool(torch.isfinite(common)) or not bool(common > 0):
        raise ModelLoadError(f"{names['global']} is {float(common)}, and a scale must be a number above 0.")
    return partial(_nvfp4_rows, tensors, 1 / common if scheme.encoding == "nvfp4" else common, held)


def _bnb4_state(tensors: Tensors, names: Parts) -> tuple[Mapping[str, Any], Tensor]:
    """Return what bitsandbytes says of a matrix, and its absmax in fp32."""
    found = [part for part in ("state_nf4", "state_fp4") if part in tensors]
    if len(found) != 1:
        raise ModelLoadError(
            f"{names['q']} needs one tensor quant_state.bitsandbytes__nf4 or …__fp4, and has {len(found)}."
        )
    try:
        state = json.loads(bytes(tensors[found[0]].tolist()))
        blocksize = int(state["blocksize"])
    except (ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"{names[found[0]]} is not readable ({error}): the file is damaged.") from None
    absmax = tensors["scale"]
    if absmax.dtype == torch.uint8:
        if not {"scale_scale", "scale_levels"} <= tensors.keys():
            raise ModelLoadError(
                f"{names['scale']} is in 8 bits, and its nested_absmax or nested_quant_map is missing."
            )
        blocks = torch.arange(absmax.numel()) // int(state["nested_blocksize"])
        absmax = (
            tensors["scale_levels"].float()[absmax.flatten().long()] * tensors["scale_scale"].float()[blocks]
        )
        absmax = absmax + float(state["nested_offset"])
    needed = -(-2 * tensors["q"].numel() // blocksize)
    if absmax.numel() != needed:
        raise ModelLoadError(
            f"{names['scale']} has {absmax.numel():,} numbers, and blocks of {blocksize} need {needed:,}."
        )
    return state, absmax.float().flatten()


def _bnb4_rows(tensors: Tensors, absmax: Tensor, blocksize: int, width: int, start: int, stop: int) -> Tensor:
    first, last = start * width, stop * width
    packed = tensors["q"].flatten()[first // 2 : -(-last // 2)]
    codes = torch.stack((packed >> 4, packed & 15), dim=1).flatten()[first % 2 :][: last - first]
    scale = absmax[torch.arange(first, last) // blocksize]
    return (tensors["levels"].float()[codes.long()] * scale).view(stop - start, width)


def _check_layout(tensors: Tensors, names: Parts) -> None:
    if "layout" in tensors and int(tensors["layout"].flatten()[0]) != 0:
        raise UnsupportedModelError(
            f"{names['layout']} says that the rows are in the order of one GPU's kernels; save the model again with a "
            "newer bitsandbytes, or take the plain checkpoint."
        )


def _bnb8_rows(tensors: Tensors, held: WeightFormat, start: int, stop: int) -> QuantizedWeight:
    scale = tensors["scale"].flatten()[start:stop].float().unsqueeze(1) / 127
    return regroup(QuantizedWeight(WeightFormat("int8"), tensors["q"][start:stop], scale, None), held)


def _check_hqq(tensors: Tensors, scheme: Scheme, names: Parts) -> None:
    """Check that the tensors say of themselves what quantization_config says."""
    expected = {"nbits": scheme.bits, "group_size": scheme.group, "axis": 0 if scheme.strided else 1}
    for part, value in expected.items():
        if part in tensors and value is not None and float(tensors[part].flatten()[0]) != value:
            raise ModelLoadError(
                f"{names[part]} is {float(tensors[part].flatten()[0]):g}, and quantization_config says {value}; "
                "config.json and weights do not belong together."
            )
    for part in ("view_as_float", "quant_scale", "quant_zero"):
        if part in tensors and bool(tensors[part].any()):
            raise UnsupportedModelError(
                f"{names[part]} is set, and scales that are quantized or hidden are not read."
            )


def _hqq_codes(packed: Tensor, bits: int, rows: Tensor, columns: Tensor) -> Tensor:
    """Return the numbers at (row, column) of the matrix as it was before its rows were packed into each other."""
    count = 10 if packed.dtype == torch.int32 else 8 // {6: 8, 5: 8}.get(bits, bits)
    width = 3 if packed.dtype == torch.int32 else 8 // count
    part, row = rows // packed.shape[0], rows % packed.shape[0]
    return packed[row, columns].int() >> ((count - 1 - part) * width) & ((1 << width) - 1)


def _hqq_parts(
    tensors: Tensors, scheme: Scheme, shape: tuple[int, ...], start: int, stop: int
) -> tuple[Tensor, Tensor]:
    """Return the numbers of rows ``[stop - start, in]``, and the group of each."""
    width, packed = shape[1], tensors["q"]
    packed = packed.view(packed.shape[0], -1)
    place = torch.arange(start * width, stop * width)
    rows, columns = place // packed.shape[1], place % packed.shape[1]
    q = _hqq_codes(packed, scheme.bits, rows, columns)
    groups = columns if scheme.strided else rows
    return q.view(stop - start, width), groups.view(stop - start, width)


def _hqq_plain(tensors: Tensors, scheme: Scheme, shape: tuple[int, ...], start: int, stop: int) -> Tensor:
    q, groups = _hqq_parts(tensors, scheme, shape, start, stop)
    scale, zero = (tensors[part].flatten().float()[groups] for part in ("scale", "zero"))
    return (q - zero) * scale


def _hqq_rows(
    tensors: Tensors, scheme: Scheme, shape: tuple[int, ...], held: WeightFormat, start: int, stop: int
) -> QuantizedWeight:
    q, groups = _hqq_parts(tensors, scheme, shape, start, stop)
    first = groups[:, :: scheme.group or shape[1]]
    scale, zero = (tensors[part].flatten().float()[first] for part in ("scale", "zero"))
    return exchange(q, scale, zero, 4 if held.kind == "int4" else 8, held)


def _nvfp4_rows(
    tensors: Tensors, common: Tensor, held: WeightFormat, start: int, stop: int
) -> QuantizedWeight:
    packed = tensors["q"][start:stop]
    q = _E2M1[torch.stack((packed & 15, packed >> 4), dim=2).flatten(1).long()]
    scale = tensors["scale"][start:stop].float() * (common / 2)
    return QuantizedWeight(held, q, scale, None)
