"""``y = x · Wᵀ + b``. The weights are held in the layout of the backend, written row range by row range.

    packed = pack_empty(out_features, in_features, dtype, bias=..., backend=..., format=...)
    write_rows(packed, start, weight[n, in_features])     # several matrices fused into one: q, k, v; gate, up
    y = linear(x, packed)                                 # [num_tokens, out_features]
    rows = read_rows(packed, ids)                         # [len(ids), in_features], for tied embeddings

Writing in ranges lets a loader build fused matrices tensor by tensor, without a second copy of the model.

A quantized matrix is written as `QuantizedWeight` and multiplies int8 activations (`kernels.quantized_rows`). `linear`
quantizes plain rows itself, or takes `QuantizedRows`, for callers that use them several times or have an op that writes
them. On a GPU, integer matrices multiply plain rows (`PackedLinear.reads_quantized` is False) and fp8 ones fp8 rows.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

import quire.kernels.linear.reference  # noqa: F401  registers it
from quire.kernels.linear.packed import HeadMatrices, PackedLinear, QuantizedWeight, range_of, stacked
from quire.kernels.quantized_rows import QuantizedRows
from quire.kernels.registry import GPU_KERNELS, NATIVE_LEVELS, Backend, find
from quire.kernels.workspace import empty
from quire.weight_format import GROUPS, PLAIN, ROTATIONS, RowFormat, WeightFormat

__all__ = [
    "HeadMatrices", "PackedLinear", "QuantizedRows", "QuantizedWeight", "head_linear", "linear", "op_of",
    "pack_empty", "pack_heads", "pack_many", "quantize_rows", "read_rows", "write_bias", "write_rows",
]  # fmt: skip


def pack_empty(
    out_features: int, in_features: int, dtype: torch.dtype, *, bias: bool, backend: Backend,
    format: WeightFormat = PLAIN,
) -> PackedLinear:  # fmt: skip
    """Return a matrix of zeros in the layout of ``backend``, for `write_rows`. ``dtype`` is the activations'."""
    packed: PackedLinear
    if format.quantized:
        whole_row = format.kind != "int4" and format.group is None
        assert whole_row or format.two_level or format.group in GROUPS[format.kind], (format, GROUPS)
        rotation = format.rotation
        assert rotation is None or (rotation in ROTATIONS and in_features % rotation == 0)
        packed = find(f"{op_of(format)}.pack_empty", backend)(out_features, in_features, format)
    else:
        packed = find("linear.pack_empty", backend)(out_features, in_features, dtype)
    packed.backend, packed.format, packed.dtype = backend, format, dtype
    packed.multiply, packed.read = (find(op_of(format) + name, backend) for name in ("", ".read_rows"))
    packed.reads_quantized = format.quantized and (format.kind == "fp8" or backend not in GPU_KERNELS)
    if bias:
        wide = format.quantized or backend in NATIVE_LEVELS  # these add the bias in fp32
        packed.bias = torch.zeros(out_features, dtype=torch.float32 if wide else dtype)
    return packed


def pack_many(
    count: int, out_features: int, in_features: int, dtype: torch.dtype, *, bias: bool, backend: Backend,
    format: WeightFormat = PLAIN,
) -> list[PackedLinear]:  # fmt: skip
    """Return ``count`` equal matrices, the experts of a block; on a GPU they lie side by side in memory."""
    num_made = 1 if backend in GPU_KERNELS else count
    made = [
        pack_empty(out_features, in_features, dtype, bias=bias, backend=backend, format=format)
        for _ in range(num_made)
    ]
    return stacked(made[0], count) if backend in GPU_KERNELS else made


def write_rows(packed: PackedLinear, start: int, weight: Tensor | QuantizedWeight) -> None:
    """Write ``weight [n, in_features]`` to output features ``start … start + n − 1``, quantized if ``packed`` is."""
    num_rows, in_features = weight.shape
    assert in_features == packed.in_features, (weight.shape, packed.in_features)
    assert 0 <= start <= start + num_rows <= packed.out_features
    if isinstance(weight, QuantizedWeight):
        assert weight.format == packed.format, (weight.format, packed.format)
        if num_rows and in_features and (limits := range_of(packed.format)) is not None:
            low, high = limits
            assert low <= int(weight.q.min()) <= int(weight.q.max()) <= high, packed.format
        find(f"{op_of(packed.format)}.write_rows", packed.backend)(packed, start, weight)
    else:
        assert not packed.format.quantized, packed.format
        find("linear.write_rows", packed.backend)(packed, start, weight)


def write_bias(packed: PackedLinear, start: int, bias: Tensor) -> None:
    """Write ``bias [n]`` to the output features ``start … start + n − 1``."""
    assert packed.bias is not None
    packed.bias[start : start + bias.shape[0]].copy_(bias)


def read_rows(packed: PackedLinear, ids: Tensor) -> Tensor:
    """Return rows of the matrix, ``[len(ids), in_features]``: the embedding look-up of a tied output matrix."""
    return packed.read(packed, ids)


def op_of(format: WeightFormat) -> str:
    """Return the op that multiplies with matrices of ``format``."""
    return {"plain": "linear", "fp8": "fp8_linear"}.get(format.kind, "quantized_linear")


def quantize_rows(
    x: Tensor, format: RowFormat, *, fp8: bool = False, backend: Backend = "reference"
) -> QuantizedRows:
    """``x [num_tokens, in_features]`` as int8, or fp8, for weights of that `WeightFormat.rows`."""
    rows: QuantizedRows = find("quantize_rows_to_fp8" if fp8 else "quantize_rows", backend)(x, format)
    return rows


def linear(
    x: Tensor | QuantizedRows, packed: PackedLinear, *, out_dtype: torch.dtype | None = None, out: Tensor | None = None
) -> Tensor:  # fmt: skip
    """``x [num_tokens, in_features]`` → ``[num_tokens, out_features]`` (rows may be strided).

    The result is in x's dtype, or in ``out_dtype`` (float32 returns a native sum as it is). It is written into ``out``
    where that is given, of that shape and dtype, such as a range of the columns of a wider result.
    """
    if out is not None:
        assert out.shape == (x.shape[0] if isinstance(x, Tensor) else x.num_tokens, packed.out_features)
        assert out.dtype == (out_dtype or x.dtype), (out.dtype, out_dtype, x.dtype)
        assert out.stride(1) == 1, out.stride()
    if not packed.reads_quantized:
        assert isinstance(x, Tensor), "rows are quantized for weights that read them only"
        return packed.multiply(x, packed, out_dtype or x.dtype, out)
    rows = x
    if isinstance(rows, Tensor):
        fp8 = packed.format.kind == "fp8"
        rows = quantize_rows(rows, packed.format.rows, fp8=fp8, backend=packed.backend)
    assert rows.in_features == packed.in_features, (rows.in_features, packed.in_features)
    assert rows.format == packed.format.rows, (rows.format, packed.format)
    if out_dtype is not None:
        rows = replace(rows, dtype=out_dtype)
    return packed.multiply(rows, packed, out)


def pack_heads(weight: Tensor, *, backend: Backend = "reference") -> HeadMatrices:
    """``weight [num_heads, in_size, out_size]`` in the layout that `head_linear` multiplies with."""
    data = find("head_linear.pack", backend)(weight)
    num_heads, in_size, out_size = weight.shape
    return HeadMatrices(num_heads, in_size, out_size, data, backend)


def head_linear(x: Tensor, heads: HeadMatrices, *, out: Tensor | None = None) -> Tensor:
    """A small matrix for every head (MLA): ``x [num_tokens, num_heads, in_size]`` → ``[..., out_size]``.

    Written into ``out`` where that is given, such as a part of wider heads.
    """
    y, (num_tokens, num_heads, _) = out, x.shape
    if y is None:
        y = empty(max(num_tokens, 1), num_heads, heads.out_size, dtype=x.dtype, device=x.device)[:num_tokens]
    assert y.shape == (*x.shape[:2], heads.out_size), (y.shape, x.shape, heads.out_size)
    find("head_linear", heads.backend)(x, heads, y)
    return y
