"""`find_sources`: which stored tensors make each canonical weight, and how it is quantized. Headers only; torch-free.

Names and shapes must match exactly: a missing or an unexpected weight is an error, because a model that is loaded
"almost" answers nonsense. All errors are found before the first weight is packed.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.families import Take, WeightMap
from quire.families.quantization_scheme import RARE, Quantization, Scheme
from quire.families.tensor_keys import keys_of
from quire.families.weights import UNUSED, Shape, stored_shapes
from quire.models.safetensors_file import StoredTensor
from quire.modelspec import ModelSpec
from quire.weight_format import GROUPS, PLAIN, Kind, WeightFormat
from quire.weight_plan import role_of

Tensors = Mapping[str, StoredTensor]
Parts = Mapping[str, str]  # "q", "scale", "zero" or "index" → stored name
FP8 = ("fp8", "fp8_inverse")  # encodings
MXFP4 = WeightFormat("fp4", 32, scales="power")
# Element type by encoding, for weights that are not in int32 words.
_TYPES = {"int8": "int8", "fp8": "float8_e4m3fn", "fp8_inverse": "float8_e4m3fn"}
FLOATS = ("float32", "float16", "bfloat16")
# Suffix after the module's name, by encoding; "index" and "shape" may be absent.
_PARTS: Mapping[str, Parts] = {
    "gptq": {"q": "qweight", "scale": "scales", "zero": "qzeros", "index": "g_idx", "bias": "bias"},
    "awq": {"q": "qweight", "scale": "scales", "zero": "qzeros"},
    "packed": {"q": "weight_packed", "scale": "weight_scale", "zero": "weight_zero_point",
               "index": "weight_g_idx", "shape": "weight_shape"},
    "fp8": {"q": "weight", "scale": "weight_scale"},
    "fp8_inverse": {"q": "weight", "scale": "weight_scale_inv"},
    "int8": {"q": "weight", "scale": "weight_scale", "zero": "weight_zero_point"},
}  # fmt: skip

_UNUSED = re.compile("|".join(f"(?:{pattern})" for pattern in UNUSED))


@dataclass(frozen=True, slots=True)
class Source:
    """Where one canonical weight comes from. ``held``: the format that holds it, without loss unless ``expanded``."""

    take: Take
    held: WeightFormat = PLAIN
    scheme: Scheme | None = None  # from quantization_config
    parts: tuple[Parts, ...] = ()  # for each of ``take.names``, with a scheme
    expanded: bool = False  # no kernel has its groups or levels


def find_sources(
    where: str, names: WeightMap, stored: Tensors, quantization: Quantization | None = None
) -> dict[str, Source]:
    """Pick the alternative that the checkpoint holds for each weight; check that none is missing or left over.

    Raises `ModelLoadError` for a name, a shape or a type that is wrong, naming the tensor; `UnsupportedModelError` for
    a quantized matrix that no kernel can hold.
    """
    chosen: dict[str, Source] = {}
    missing: list[str] = []
    for canonical, takes in names.sources.items():
        candidates = (_source(take, stored, quantization) for take in takes)
        source = next((candidate for candidate in candidates if candidate is not None), None)
        if source is None:
            missing.append(next(name for name in takes[0].names if name not in stored))
        else:
            chosen[canonical] = source
    if missing:
        raise ModelLoadError(
            f"{where}: {len(missing)} weights are missing, {_some(missing)}; the checkpoint is incomplete or "
            f"config.json belongs to another model{_look_at(names, *missing)}."
        )
    _check_names(where, names, chosen, stored)
    for source in chosen.values():
        if source.scheme is None:
            for name, shape in zip(source.take.names, stored_shapes(source.take), strict=True):
                _check(stored[name], name, shape, _types_of(source, stored[name]), _look_at(names, name))
        else:
            for parts in source.parts:
                _check_parts(source.take, source.scheme, parts, stored)
    return chosen


def stored_formats(spec: ModelSpec, sources: Mapping[str, Source]) -> dict[str, WeightFormat]:
    """Return how the quantized matrices of a checkpoint are held: what `plan_weights` starts from."""
    formats = {}
    for name, source in sources.items():
        if source.held.quantized and role_of(spec, name) != "other":
            formats[name] = source.held
    for name, weight_format in formats.items():
        up = name.replace(".moe.gate.", ".moe.up.")
        if ".moe.gate." in name and formats.get(up) != weight_format:
            raise UnsupportedModelError(
                f"{name} is stored as {weight_format} and {up} as {formats.get(up, PLAIN)}; experts need both alike."
            )
    return formats


def _source(take: Take, stored: Tensors, quantization: Quantization | None) -> Source | None:
    """Return how ``take`` is stored, None where a part is missing."""
    if not take.names:
        return Source(take)
    scheme = _scheme(take, stored, quantization)
    if scheme is not None:
        parts = tuple(_parts(name, scheme, stored) for name in take.names)
        if not all(parts):
            return None
        if scheme.encoding in RARE:
            held, expanded = _rare().held_as_rare(take, scheme)
            return Source(take, held, scheme, parts, expanded)
        if any("index" in part and not _is_in_order(stored[part["index"]], scheme) for part in parts):
            held = WeightFormat("int8", None if take.shape[1] % 32 else 32)
            return Source(take, held, scheme, parts, expanded=True)
        return Source(take, _held(take, scheme), scheme, parts)
    if any(name not in stored for name in take.names):
        return None
    if take.encoding == "mxfp4":
        return Source(take, MXFP4)
    held = stored[take.names[0]].held if take.encoding == "plain" else PLAIN
    return Source(take, held.wide if take.pieces and take.dim == 1 else held)


def _scheme(take: Take, stored: Tensors, quantization: Quantization | None) -> Scheme | None:
    name = take.names[0]
    if quantization is None or not name.endswith(".weight"):
        return None
    module = name.removesuffix(".weight")
    scheme = quantization.scheme_of(module)
    if scheme is None:
        return None
    suffixes = _suffixes(scheme)
    q = stored.get(f"{module}.{suffixes['q']}")
    if q is None:
        return None
    dtype = _rare().TYPES.get(scheme.encoding) if scheme.encoding in RARE else _TYPES.get(scheme.encoding)
    if dtype is not None and f"{module}.{suffixes['scale']}" not in stored:
        return None
    if dtype is not None and q.dtype != dtype:
        raise ModelLoadError(
            f"{q.file}: {module}.{suffixes['q']} is of type {q.dtype}, and quantization_config says {dtype}; "
            "config.json and weights do not belong together."
        )
    if take.transpose or take.step != 1 or take.dim != 0:
        raise UnsupportedModelError(
            f"{name}: a matrix that this family cuts along its inputs is not read quantized."
        )
    return scheme


def _rare() -> Any:
    """Return the module of formats that Quire reads and does not hold as they are."""
    from quire.models import rare_formats

    return rare_formats


def _suffixes(scheme: Scheme) -> Parts:
    """Return part → suffix after the module's name."""
    encoding = scheme.encoding.removesuffix("_gemv")
    suffixes: Parts = _rare().PARTS[encoding] if encoding in RARE else _PARTS[encoding]
    return suffixes


def _parts(name: str, scheme: Scheme, stored: Tensors) -> Parts:
    """Return part → stored name; empty where one is missing."""
    module = name.removesuffix(".weight")
    parts = {part: f"{module}.{suffix}" for part, suffix in _suffixes(scheme).items()}
    needed = ["q", "scale"]
    if scheme.encoding in RARE:
        needed = _rare().NEEDED[scheme.encoding]
    elif scheme.encoding == "gptq" or not scheme.symmetric:
        needed.append("zero")
    if any(parts[part] not in stored for part in needed):
        return {}
    return {part: stored_name for part, stored_name in parts.items() if stored_name in stored}


def _is_in_order(index: StoredTensor, scheme: Scheme) -> bool:
    """Whether groups are of consecutive inputs: ``index`` has the group of each input."""
    group, wide = scheme.group or index.shape[0], index.dtype == "int64"
    numbers = array("q" if wide else "i", (k // group for k in range(index.shape[0])))
    return bytes(memoryview(index.buffer)[index.offset : index.offset + index.num_bytes]) == numbers.tobytes()


def rounded_again(sources: Mapping[str, Source]) -> tuple[str, ...]:
    """Return lines about the matrices that are not held as they are stored, where there are any."""
    matrices = [
        (source.scheme.encoding, source.expanded) for source in sources.values() if source.scheme is not None
    ]
    rare = [matrix for matrix in matrices if matrix[0] in RARE]
    count = sum(expanded for _, expanded in matrices) - sum(expanded for _, expanded in rare)
    lines: tuple[str, ...] = _rare().remarks_of(rare) if rare else ()
    again = "expanded, and rounded again to int8 in groups of 32"
    if count:
        lines += (f"matrices with act order, groups of inputs in an order of their own: {count}, {again}",)
    return lines


def _held(take: Take, scheme: Scheme) -> WeightFormat:
    kind: Kind = "fp8" if scheme.encoding in FP8 else "int4" if scheme.bits <= 4 else "int8"
    if kind == "fp8" and scheme.group is not None and take.shape[1] % scheme.group:
        # The last block of a row is shorter: groups divide it and the others, with scales repeated.
        return WeightFormat("fp8", gcd(take.shape[1], scheme.group))
    weight_format = held_as(kind, scheme.group, take.shape[1], has_offset=not scheme.symmetric)
    if weight_format is None:
        raise UnsupportedModelError(
            f"{take.names[0]}: {scheme.bits} bits in groups of {scheme.group} over {take.shape[1]} inputs cannot "
            f"be held; groups must be a multiple of one of {sorted(GROUPS[kind])} and divide the inputs, or be a row."
        )
    return weight_format


def _check_names(where: str, names: WeightMap, chosen: Mapping[str, Source], stored: Tensors) -> None:
    used = {name for source in chosen.values() if source.scheme is None for name in source.take.names}
    used.update(name for source in chosen.values() for parts in source.parts for name in parts.values())
    ignored = re.compile("|".join(f"(?:{pattern})" for pattern in names.ignore))
    over = [name for name in stored if name not in used and not ignored.fullmatch(name)]
    if over:
        raise ModelLoadError(
            f"{where}: {len(over)} tensors have no place in this model, {_some(over)}; config.json belongs to "
            f"another model, or the checkpoint has parts that Quire does not run{_look_at(names, *over)}."
        )


def _types_of(source: Source, stored: StoredTensor) -> tuple[str, ...]:
    if source.take.encoding == "mxfp4":
        return ("uint8",)
    return (*FLOATS, stored.dtype) if stored.held.quantized else FLOATS


def _check_parts(take: Take, scheme: Scheme, parts: Parts, stored: Tensors) -> None:
    """Check the shape and the type of every part of one matrix ``take.shape``."""
    if scheme.encoding in RARE:
        _rare().check_rare(take, scheme, parts, stored)
        return
    (out, in_), per_word = take.shape, 32 // scheme.bits
    groups = 1 if scheme.group is None else in_ // scheme.group
    shapes: dict[str, Shape]
    if scheme.encoding == "gptq":
        shapes = {"q": (in_ // per_word, out), "scale": (groups, out), "zero": (groups, out // per_word)}
        shapes |= {"index": (in_,), "bias": (out,)}
    elif scheme.encoding == "awq":
        shapes = {"q": (in_, out // per_word), "scale": (groups, out), "zero": (groups, out // per_word)}
    elif scheme.encoding == "awq_gemv":
        words = -(-in_ // max(1024, 8 * in_ // groups)) * max(1, 128 * groups // in_)  # with padding
        shapes = {"q": (out, in_ // per_word), "scale": (out, words * per_word), "zero": (out, words)}
    elif scheme.encoding == "packed":
        shapes = {"q": (out, -(-in_ // per_word)), "scale": (out, groups), "index": (in_,), "shape": (2,)}
        shapes["zero"] = (-(-out // per_word), groups)
    else:
        shapes = {"q": (out, in_), "scale": (out, groups), "zero": (out, groups)}
    if scheme.encoding in FP8:
        shape = stored[parts["scale"]].shape
        per_row = shape if shape in ((), (1,), (out,)) else (out, 1)  # one scale, or one per row
        shapes["scale"] = (
            per_row if scheme.group is None else (-(-out // scheme.group), -(-in_ // scheme.group))
        )
    integers = (_TYPES.get(scheme.encoding, "int32"),)
    types = {"scale": FLOATS, "bias": FLOATS, "index": ("int32", "int64"), "shape": ("int32", "int64")}
    for part, name in parts.items():
        _check(stored[name], name, shapes[part], types.get(part, integers))


def _check(
    stored: StoredTensor, name: str, expected: Shape, types: tuple[str, ...], look_at: str = ""
) -> None:
    if stored.dtype not in types:
        raise ModelLoadError(
            f"{stored.file}: {name} is of type {stored.dtype}, which is not how this weight is stored; config.json "
            "and weights do not belong together."
        )
    if stored.shape != expected:
        raise ModelLoadError(
            f"{stored.file}: {name} has shape {list(stored.shape)}, and the configuration asks for "
            f"{list(expected)}; config.json and weights do not belong together{look_at}."
        )


def _look_at(names: WeightMap, *stored: str) -> str:
    """Return the end of an error that names the keys of config.json to look at."""
    keys = dict.fromkeys(key for name in stored for key in keys_of(name, names.num_layers, names.keys))
    return f": look at {', '.join(keys)}" if keys else ""


def unused(stored: Tensors, used: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return a line that names the tensors that no answer needs, where there are any.

    ``used``: how the names of an encoder's tensors begin, which another loader reads.
    """
    names = [name for name in stored if _UNUSED.fullmatch(name) and not name.startswith(used)]
    what = "is a tensor" if len(names) == 1 else "are tensors"
    return (f"{len(names)} {what} that no answer needs, {_some(names)}: not read",) if names else ()


def _some(names: Iterable[str]) -> str:
    first = sorted(names)[:3]
    return "for example " + ", ".join(first)


def held_as(kind: Kind, group: int | None, in_features: int, *, has_offset: bool) -> WeightFormat | None:
    """Return the format that holds stored groups of ``group`` inputs (None: the whole row) without loss, or None.

    A group size that no kernel supports is cut into smaller groups with equal scales; int4 that fits none becomes int8.
    """
    group_size = in_features if group is None else group
    if in_features % group_size:
        return None
    if kind != "int4" and group_size == in_features:
        return WeightFormat(kind, None, has_offset)
    for size in GROUPS[kind]:
        if group_size % size == 0:
            return WeightFormat(kind, size, has_offset)
    return held_as("int8", group, in_features, has_offset=has_offset) if kind == "int4" else None
