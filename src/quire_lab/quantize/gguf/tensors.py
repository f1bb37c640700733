"""Which tensors a GGUF file has, what each is made from, and the type of its blocks.

Types are those that llama.cpp's own quantizer gives a model: of a mix ("q4_k_m") the matrices of v and down of every
third layer, and of the first and last eighth, get six bits, and the output matrix does too. Where 256 does not divide
the inputs, a type of blocks of 32 takes its place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.errors import ConfigError, UnsupportedModelError
from quire.families.gguf_maps import gguf_weight_map
from quire.families.gguf_types import BLOCK_TYPES
from quire.families.weights import Take
from quire.modelspec import weight_shapes
from quire_lab.quantize.gguf.grids import SCHEMES
from quire_lab.quantize.scheme import Plan, Scheme, kept
from quire_lab.quantize.source import Matrix, Source

# By `--gguf-type`: the type of most matrices, that of v and down in some layers, and that of the output matrix.
MIXES: Mapping[str, tuple[str, str, str]] = {
    "q8_0": ("q8_0", "q8_0", "q8_0"),
    "q6_k": ("q6_k", "q6_k", "q6_k"),
    "q5_k_m": ("q5_k", "q6_k", "q6_k"),
    "q5_k": ("q5_k", "q5_k", "q6_k"),
    "q4_k_m": ("q4_k", "q6_k", "q6_k"),
    "q4_k": ("q4_k", "q4_k", "q6_k"),
    "q4_0": ("q4_0", "q4_0", "q6_k"),
    "iq4_xs": ("iq4_xs", "iq4_xs", "q6_k"),
}
# `general.file_type` of llama.cpp, which it prints.
FILE_TYPES: Mapping[str, int] = {
    "q8_0": 7, "q6_k": 18, "q5_k_m": 17, "q5_k": 16, "q4_k_m": 15, "q4_k": 14, "q4_0": 2, "iq4_xs": 30,
}  # fmt: skip
OF_BITS: Mapping[int, str] = {8: "q8_0", 6: "q6_k", 5: "q5_k_m", 4: "q4_k_m"}
_NARROW = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0", "iq4_xs": "iq4_nl"}
_WITH_MORE = re.compile(r"\.(attn\.v|mlp\.down|moe\.down)\.weight$")


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of the file: the stored tensors whose rows it has, one after the other.

    ``pairwise_heads``: the rows of each head are written in the pairwise order of llama.cpp's RoPE. ``plus_one``: 1 is
    added to what is stored.
    """

    name: str
    shape: tuple[int, ...]
    stored: tuple[str, ...]
    pairwise_heads: int = 0
    plus_one: bool = False


def targets(source: Source, metadata: Mapping[str, Any]) -> tuple[Target, ...]:
    """Return the tensors of the file that holds ``source``.

    Raises:
        UnsupportedModelError: one of its weights has no place in a GGUF file.
    """
    spec = source.checkpoint.spec
    places = gguf_weight_map(replace(spec, norm_plus_one=False), metadata).sources
    by_tensor: dict[str, Target] = {}
    for canonical in weight_shapes(spec):
        place = next((take for take in places.get(canonical, ()) if take.names), None)
        target = None if place is None else _target(source, canonical, place)
        if target is None or by_tensor.setdefault(target.name, target) != target:
            raise UnsupportedModelError(
                f"{source.folder}: {canonical} is stored in a form that has no place in a GGUF file; take --format "
                "compressed-tensors"
            )
    return tuple(by_tensor.values())


def _target(source: Source, canonical: str, place: Take) -> Target | None:
    spec = source.checkpoint.spec
    if len(place.names) != 1 or place.encoding != "plain" or place.transpose or place.pieces:
        return None
    plus_one = spec.norm_plus_one and canonical.endswith("norm.weight")
    if canonical in source.experts:
        stored = source.experts[canonical]
        return Target(place.names[0], (len(stored), *place.shape[-2:]), stored)
    name, take = source.takes.get(canonical, (None, None))
    if name is None or take is None:
        return None
    same = replace(take, names=(), unpermute_heads=0) == replace(place, names=(), unpermute_heads=0)
    if not same or take.unpermute_heads or take.stacked:
        return None
    return Target(place.names[0], place.shape, (name,), place.unpermute_heads, plus_one)


def _type_for(wanted: str, in_features: int) -> str | None:
    if in_features % BLOCK_TYPES[wanted].block == 0:
        return wanted
    narrow = _NARROW.get(wanted, wanted)
    return narrow if in_features % BLOCK_TYPES[narrow].block == 0 else None


def gets_more(layer: int, num_layers: int) -> bool:
    """Tell whether a mix gives v and down of ``layer`` more bits, as llama.cpp's ``use_more_bits``."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def gguf_plan(source: Source, gguf_type: str, keep: Sequence[str]) -> Plan:
    """Return the scheme of each matrix of the decoder layers. Raises `ConfigError` for a pattern that is wrong."""
    most, more, _ = MIXES[gguf_type]
    patterns = kept(source.matrices, keep)
    schemes: dict[str, Scheme | None] = {}
    others: dict[tuple[str, str], int] = {}
    for matrix in source.matrices:
        wanted = more if _with_more(matrix, source.num_layers) else most
        type_name = _type_for(wanted, matrix.in_features)
        if any(pattern.search(matrix.name) for pattern in patterns):
            type_name = None
        elif type_name != wanted:
            text = "16 bits" if type_name is None else type_name.upper()
            key = (
                f"{matrix.in_features} inputs, which 256 does not divide",
                f"{text} instead of {wanted.upper()}",
            )
            others[key] = others.get(key, 0) + 1
        schemes[matrix.name] = None if type_name is None else SCHEMES[type_name]
    if not any(schemes.values()):
        raise ConfigError(
            f"no matrix of this model gets a type of GGUF: {', '.join(keep) or 'blocks do not fit'}"
        )
    return Plan(schemes, tuple(f"{count} matrices of {why}: {what}" for (why, what), count in others.items()))


def _with_more(matrix: Matrix, num_layers: int) -> bool:
    fits = any(_WITH_MORE.search(part) for part in matrix.parts)
    return fits and gets_more(matrix.layer, num_layers)


def table_schemes(source: Source, gguf_type: str) -> dict[str, Scheme]:
    """Return the schemes of the embedding and of the output matrix, by stored names."""
    most, _, head = MIXES[gguf_type]
    spec = source.checkpoint.spec
    wanted = {"embed.weight": head if spec.tie_word_embeddings else most, "lm_head.weight": head}
    schemes = {}
    for canonical, kind in wanted.items():
        type_name = _type_for(kind, spec.hidden_size)
        if canonical in source.takes and canonical in weight_shapes(spec) and type_name is not None:
            schemes[source.takes[canonical][0]] = SCHEMES[type_name]
    return schemes
