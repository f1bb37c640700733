"""The mapped bytes of a checkpoint as tensors, and quantized matrices over them that decode rows on demand."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.families.gguf_types import BLOCK_TYPES
from quire.families.quantization_scheme import RARE, Scheme
from quire.families.weights import Take
from quire.kernels.linear.packed import QuantizedWeight
from quire.models.safetensors_file import StoredTensor
from quire.models.weight_sources import FP8, Parts, Source
from quire.parallel.shard import Cut
from quire.quant.rtn import quantize
from quire.quant.stored import AWQ_ORDER, StoredMatrix, StoredStack, exchange, regroup, unpack
from quire.weight_format import Kind, WeightFormat

Tensors = Mapping[str, Tensor]  # part → tensor
_TORCH: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in ("float32", "float16", "bfloat16", "uint8", "int8", "float8_e4m3fn", "int32", "int64")
}


def view(stored: StoredTensor) -> Tensor:
    """Return the stored tensor as a view of the mapping; a quantized one of GGUF as its bytes, ``[…, rows, bytes]``."""
    if stored.num_bytes == 0:
        return torch.empty(stored.shape, dtype=_TORCH[stored.dtype])
    raw = torch.frombuffer(stored.buffer, dtype=torch.uint8, count=stored.num_bytes, offset=stored.offset)
    if stored.dtype in BLOCK_TYPES:
        return raw.view(*stored.shape[:-1], -1)
    dtype = _TORCH[stored.dtype]
    if stored.offset % dtype.itemsize:
        raw = raw.clone()  # unaligned bytes (a header of odd length) cannot be a view
    return raw.view(dtype).view(stored.shape)


def unpermute(tensor: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's order of the rows of q and k: pairs (i, i + dim/2) lie side by side there."""
    half = tensor.shape[0] // heads // 2
    return tensor.view(heads, half, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def open_quantized(
    source: Source, stored: Mapping[str, StoredTensor], cut: Cut
) -> StoredMatrix | StoredStack:
    """Return the part ``cut`` of the quantized matrix, or of the matrices of all experts, of ``source``.

    Columns are cut at whole groups.

    Raises `ModelLoadError` and `UnsupportedModelError` for values that contradict quantization_config.
    """
    if source.scheme is None:
        return _open_gguf(source.take, source.held, stored, cut)
    stack = source.parts if cut.experts is None else source.parts[cut.experts.start : cut.experts.stop]
    matrices = tuple(
        _open_parts(source, {part: stored[name] for part, name in parts.items()}, parts, cut.columns)
        .in_pieces(source.take.pieces).rows(cut.rows)
        for parts in stack
    )  # fmt: skip
    return StoredStack(matrices) if source.take.stacked else matrices[0]


def _open_gguf(
    take: Take, held: WeightFormat, stored: Mapping[str, StoredTensor], cut: Cut
) -> StoredMatrix | StoredStack:
    from quire.models.gguf_weights import open_blocks, open_mxfp4, open_pieces

    tensor = stored[take.names[0]]
    raw = view(tensor)
    if take.encoding == "mxfp4":
        rows_taken = slice(take.start, take.stop, take.step)
        blocks, scales = (view(stored[name])[:, rows_taken] for name in take.names)
        return open_mxfp4(take.names[0], tensor, blocks, scales, held, cut)
    rows = raw.dim() - 2
    raw = raw.narrow(rows, take.start, (raw.shape[rows] if take.stop is None else take.stop) - take.start)
    order = unpermute(torch.arange(raw.shape[rows]), take.unpermute_heads) if take.unpermute_heads else None
    if take.pieces and take.dim == 1:
        return open_pieces(take.names[0], tensor, raw, take.pieces, held, cut)
    if take.pieces:
        order = torch.cat([torch.arange(piece.start, piece.stop) for piece in take.pieces])
    return open_blocks(take.names[0], tensor, raw, order, held, cut)


def joined_halves(take: Take, stored: Mapping[str, StoredTensor]) -> Tensor:
    """Return MLA's ``kv_b [heads · (keys + values), in]`` from its two halves."""
    halves = []
    for name in take.names:
        tensor = stored[name]
        plain = Take((name,), tensor.shape)
        block = BLOCK_TYPES.get(tensor.dtype)
        if block is None:
            halves.append(view(tensor).float())
        else:
            matrix = _open_gguf(plain, block.held, stored, Cut(name))
            halves.append(matrix.expand(torch.float32))
    of_keys, of_values = halves
    return torch.cat((of_keys.transpose(1, 2), of_values), dim=1).flatten(0, 1)


def _open_parts(
    source: Source, stored: Mapping[str, StoredTensor], names: Parts, columns: range | None
) -> StoredMatrix:
    take, weight_format, scheme = source.take, source.held, source.scheme
    assert scheme is not None
    tensors: Tensors = {part: view(tensor) for part, tensor in stored.items()}
    out, in_features = take.shape
    if "bias" in tensors and tensors["bias"].any():
        raise UnsupportedModelError(f"{names['bias']} is not zero, and this model has no bias there.")
    if scheme.symmetric and "zero" in tensors:
        _check_zeros(tensors["zero"], scheme, names["zero"])
        tensors = {part: tensor for part, tensor in tensors.items() if part != "zero"}
    first = take.start
    last = out if take.stop is None else take.stop
    if scheme.encoding in RARE:
        from quire.models.rare_weights import open_rare

        return open_rare(take, weight_format, scheme, tensors, names, columns, expanded=source.expanded)
    if scheme.encoding == "awq_gemv":
        # Few numbers, so they are unpacked at once; what pads a row to whole words goes.
        groups = 1 if scheme.group is None else in_features // scheme.group
        zero = unpack(tensors["zero"], scheme.bits)[:, :groups]
        tensors = {**tensors, "scale": tensors["scale"][:, :groups], "zero": zero}
    if scheme.encoding in FP8 and scheme.group and in_features % scheme.group:
        assert weight_format.group is not None
        scale = tensors["scale"].repeat_interleave(scheme.group // weight_format.group, 1)
        tensors = {**tensors, "scale": scale[:, : in_features // weight_format.group]}
    if source.expanded:
        _check_index(tensors, scheme, names["index"])
        columns = columns or range(in_features)
        plain = partial(_plain_rows, tensors, scheme, in_features, columns)
        matrix = StoredMatrix(
            weight_format,
            (out, len(columns)),
            lambda start, stop: quantize(plain(start, stop), weight_format),
            plain,
        )
        return matrix.rows(range(first, last))
    if columns is not None:
        tensors = _columns_of(tensors, scheme, in_features, columns)
        in_features = len(columns)
    decode = _int8_rows if scheme.encoding == "int8" else partial(_word_rows, scheme)
    if scheme.encoding in FP8:
        decode = partial(_fp8_rows, scheme)

    def read(start: int, stop: int) -> QuantizedWeight:
        # Words of 4 or 8 outputs are read as a whole.
        low, high = (first + start) // 8 * 8, min(out, -(-(first + stop) // 8) * 8)
        rows = decode(tensors, weight_format, low, high, in_features)
        cut = slice(first + start - low, first + stop - low)
        offset = None if rows.offset is None else rows.offset[cut]
        return QuantizedWeight(weight_format, rows.q[cut], rows.scale[cut], offset)

    return StoredMatrix(weight_format, (last - first, in_features), read)


def _columns_of(tensors: Tensors, scheme: Scheme, in_features: int, columns: range) -> Tensors:
    """Return the parts of a matrix for the inputs ``columns``, which are whole words and whole groups."""
    dims = {"packed": 1, "gptq": 0, "awq": 0}  # dimension of the inputs
    dim = dims.get(scheme.encoding, 1)
    parts = dict(tensors)
    for part in ("q", "scale", "zero"):
        tensor = tensors.get(part)
        if tensor is None or tensor.dim() < 2 or tensor.shape[dim] == 1:
            continue  # one scale for the whole row
        is_words = part == "q" and scheme.encoding == "packed"
        per_unit = (
            32 // scheme.bits if is_words else in_features // tensor.shape[dim]
        )  # inputs of a word or group
        if columns.start % per_unit:
            raise UnsupportedModelError(
                f"a matrix of {in_features} inputs in groups of {per_unit} cannot be cut at input {columns.start}; "
                "give fewer tensor-parallel ranks."
            )
        parts[part] = tensor.narrow(
            dim, columns.start // per_unit, -(-columns.stop // per_unit) - columns.start // per_unit
        )
    return parts


def _word_rows(
    scheme: Scheme, tensors: Tensors, held: WeightFormat, low: int, high: int, in_features: int
) -> QuantizedWeight:
    """Decode the outputs ``low … high − 1``, multiples of 8, of a matrix in int32 words."""
    bits, per_word = scheme.bits, 32 // scheme.bits
    words, scale, zero = tensors["q"], tensors["scale"], tensors.get("zero")
    if scheme.encoding == "packed":
        q = unpack(words[low:high], bits)[:, :in_features]
        if zero is not None:
            # The first word may begin before these outputs: of 3 bits it has 10.
            before = low % per_word
            zero = unpack(zero[low // per_word : -(-high // per_word)].t(), bits).t()[
                before : before + high - low
            ]
        return exchange(q, scale[low:high], zero, bits, held)
    if scheme.encoding == "awq_gemv":
        assert zero is not None
        return exchange(unpack(words[low:high], bits), scale[low:high], zero[low:high], bits, held)
    columns = slice(low // per_word, high // per_word)
    if zero is not None:
        zero = zero[:, columns]
        if scheme.zero_minus_one:
            # Added to whole words: a carry undoes the borrow of the subtraction.
            zero = zero + 0x1111_1111 if bits == 4 else zero + 0x0101_0101
        zero = unpack(zero, bits, AWQ_ORDER if scheme.encoding == "awq" else None).t()
    if scheme.encoding == "awq":
        q = unpack(words[:, columns], bits, AWQ_ORDER).t()
    else:
        q = unpack(words[:, low:high].t(), bits)
    return exchange(q.contiguous(), scale[:, low:high].t().contiguous(), zero, bits, held)


def _int8_rows(
    tensors: Tensors, held: WeightFormat, low: int, high: int, in_features: int
) -> QuantizedWeight:
    q, scale = tensors["q"][low:high], tensors["scale"][low:high].float()
    offset = -scale * tensors["zero"][low:high].float() if "zero" in tensors else None
    return regroup(QuantizedWeight(held, q, scale, offset), held)


def _fp8_rows(
    scheme: Scheme, tensors: Tensors, held: WeightFormat, low: int, high: int, in_features: int
) -> QuantizedWeight:
    """Each row gets the scale of its block, or of the whole matrix."""
    scale = tensors["scale"].float()
    rows = torch.arange(low, high)
    if scheme.group is not None:
        return QuantizedWeight(held, tensors["q"][low:high], scale[rows // scheme.group])
    scales = scale.expand(1) if scale.dim() == 0 else scale.flatten()
    return QuantizedWeight(held, tensors["q"][low:high], scales[rows % len(scales)].unsqueeze(1))


def _plain_rows(
    tensors: Tensors, scheme: Scheme, in_features: int, columns: range, start: int, stop: int
) -> Tensor:
    """Expand rows whose groups are inputs of any order."""
    low, high = start // 8 * 8, min(-(-stop // 8) * 8, _num_rows(tensors, scheme))
    kind: Kind = "int4" if scheme.bits <= 4 else "int8"
    stored = WeightFormat(kind, scheme.group, has_offset="zero" in tensors)
    rows = _word_rows(scheme, tensors, stored, low, high, in_features)
    group_of = tensors["index"].long()
    weight = rows.q.float() * rows.scale[:, group_of]
    if rows.offset is not None:
        weight += rows.offset[:, group_of]
    return weight[start - low : stop - low, columns.start : columns.stop]


def _num_rows(tensors: Tensors, scheme: Scheme) -> int:
    return tensors["scale"].shape[0 if scheme.encoding == "packed" else 1]


def _check_index(tensors: Tensors, scheme: Scheme, name: str) -> None:
    """Check that the index names groups that exist."""
    groups = tensors["scale"].shape[1 if scheme.encoding == "packed" else 0]
    if int(tensors["index"].min()) < 0 or int(tensors["index"].max()) >= groups:
        raise ModelLoadError(
            f"{name} names group {int(tensors['index'].max())} of {groups}; the file is damaged, or belongs to another "
            "configuration."
        )


def _check_zeros(zero: Tensor, scheme: Scheme, name: str) -> None:
    """Check that every zero point of a symmetric checkpoint is the middle."""
    middle = 0
    if scheme.encoding in ("gptq", "awq", "packed"):  # zero points in words
        middle_zero = (1 << scheme.bits - 1) - scheme.zero_minus_one
        word = sum(middle_zero << bit for bit in range(0, 32 - scheme.bits + 1, scheme.bits))
        middle = int(torch.tensor([word]).to(torch.int32))
    if (zero != middle).any():
        raise ModelLoadError(
            f"{name} has zero points, and quantization_config says that the weights are symmetric; config.json and "
            "weights do not belong together."
        )
