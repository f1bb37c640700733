"""`weight_table`: the formats, bits and bytes of a model's weights, for people and benchmarks. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from quire.modelspec import ModelSpec, matrix_bytes, weight_shapes
from quire.weight_format import PLAIN
from quire.weight_plan import Formats, Role, role_of


@dataclass(frozen=True, slots=True)
class TableRow:
    """The format of one part of the model. ``bytes_per_token``: read to decode one token alone."""

    part: str
    held: str
    bits: float  # per weight, with scales and offsets
    num_bytes: int
    bytes_per_token: int


def weight_table(spec: ModelSpec, dtype: str, formats: Formats) -> list[TableRow]:
    """Return one row per (part, format), for people and for benchmarks.

    Experts count with the share that a token uses. Of an embedding table a token reads one row; a tied table counts
    as the output matrix.
    """
    numbers: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    read: Counter[tuple[str, str]] = Counter()
    for name, shape in weight_shapes(spec).items():
        weight_format = formats.get(name, PLAIN)
        key = (_PART_NAMES[role_of(spec, name)], str(weight_format) if weight_format.quantized else dtype)
        size = matrix_bytes(shape, dtype, weight_format)
        numbers[key] += prod(shape)
        sizes[key] += size
        read[key] += _read_share(spec, name, shape, size)
    return [TableRow(*key, 8 * sizes[key] / numbers[key], sizes[key], read[key]) for key in sizes]


_PART_NAMES: Mapping[Role, str] = {
    "linear": "linears",
    "head": "output matrix",
    "table": "embedding table",
    "other": "norms, biases, routers",
}


def _read_share(spec: ModelSpec, name: str, shape: tuple[int, ...], size: int) -> int:
    if role_of(spec, name) == "table":
        return size // spec.vocab_size
    if len(shape) == 3:
        moe = spec.layers[int(name.split(".")[1])].mlp.moe
        assert moe is not None
        return size * moe.top_k // moe.num_experts
    return size


def activations_of(dtype: str, formats: Formats) -> str:
    """Return the type of a CPU's linears' inputs: int8 with quantized weights, otherwise the engine's type."""
    rows = {format.rows for format in formats.values() if format.quantized}
    if not rows:
        return dtype
    blocks = sorted({row.block or 0 for row in rows})
    scales = " or ".join(f"per {block} inputs" if block else "a token" for block in blocks)
    rotated = ", rotated" if any(row.rotation for row in rows) else ""
    return f"int8, a scale {scales}{rotated} ({dtype} elsewhere)"
