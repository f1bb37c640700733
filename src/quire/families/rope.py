"""Rotary embeddings as configurations write them: ``rope_parameters`` (transformers 5) or ``rope_theta`` with
``rope_scaling`` (before), → `RopeSpec`.

Factors that multiply cos and sin are computed here, so that code that makes the frequencies needs no formula:
YaRN (Peng et al. 2023, arXiv:2309.00071, §3.4) and LongRoPE (Ding et al. 2024, arXiv:2402.13753).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, cast

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.families.shape import Fields
from quire.rope_spec import RopeSpec

KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")
Kind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional"]


def rope_from_config(
    f: Fields, head_dim: int, *, default_theta: float = 10_000.0, layer_type: str | None = None,
    interleaved: bool = False, partial: bool = False, theta_key: str = "rope_theta",
) -> RopeSpec:  # fmt: skip
    """Read the rotary embedding of the layers of ``layer_type`` (None: of all layers) from a whole ``config.json``.

    ``partial``: the family may rotate a part of each head. ``theta_key``: the older name of the base frequency.
    """
    scaling = scaling_fields(f, layer_type)
    theta = _theta(f, scaling, default_theta, theta_key)
    factor = scaling.number("partial_rotary_factor", f.number("partial_rotary_factor", 1.0))
    if kind_of(scaling) == "proportional":
        if factor > 1:
            raise scaling.wrong("partial_rotary_factor", "at most 1")
        return RopeSpec(
            theta,
            head_dim,
            "proportional",
            interleaved=interleaved,
            factor=scaling.number("factor", 1.0),
            part=factor,
        )
    for fields in () if partial else (f, scaling):
        fields.refuse("partial_rotary_factor", unless=(1, 1.0), why="this family rotates whole heads")
    dim = int(head_dim * factor)
    if dim % 2 or not 0 < dim <= head_dim:
        raise (scaling if scaling.has("partial_rotary_factor") else f).wrong(
            "partial_rotary_factor",
            f"such that an even part of head_dim = {head_dim} (hidden_size / num_attention_heads unless it is given) "
            "is rotated",
        )
    return scaled_rope(f, scaling, RopeSpec(theta, dim, interleaved=interleaved))


def _theta(f: Fields, scaling: Fields, default: float, key: str) -> float:
    """Return the base frequency. Of two spellings, the one that differs from the family's default counts."""
    if not scaling.has("rope_theta") or not f.has(key):
        return scaling.number("rope_theta", f.number(key, default))
    new, old = scaling.number("rope_theta"), f.number(key)
    if old not in (new, default):
        raise ModelLoadError(
            f"{scaling.where}: rope_theta = {new:g}, and {key} = {old:g} beside it says something else: keep the one "
            "that the model was trained with."
        )
    return new


def scaling_fields(f: Fields, layer_type: str | None = None) -> Fields:
    """Return the object that holds the kind and its parameters: empty when the configuration has none.

    Where both spellings are there, the one that is more than the default counts; the other may add a base frequency.

    Raises:
        ModelLoadError: both say something, and not the same.
    """
    new, old = _of_layers(f, layer_type), f.nested("rope_scaling")
    if new is None or old is None:
        return new or old or Fields({}, f"{f.where}, rope_scaling")
    if kind_of(old) == "default":
        return new
    stated = {key: value for key, value in old.values.items() if value is not None}
    if kind_of(new) == "default":
        wanted = {key: value for key, value in new.values.items() if key not in ("rope_type", "type")}
    else:
        wanted = {**new.values, "rope_type": kind_of(new)}
    stated["rope_type"] = kind_of(old)
    for key in stated.keys() & wanted.keys():
        if key != "type" and wanted[key] not in (None, stated[key]):
            raise ModelLoadError(
                f"{f.where}: rope_parameters has {key} = {wanted[key]!r} and rope_scaling {key} = {stated[key]!r}: "
                "keep the one that the model was trained with."
            )
    return Fields({**wanted, **stated}, f"{f.where}, rope_scaling")


def _of_layers(f: Fields, layer_type: str | None) -> Fields | None:
    """Return the part of ``rope_parameters`` that is about layers of that type; None where there is no such key."""
    parameters = f.nested("rope_parameters")
    if parameters is None:
        return None
    by_type = any(isinstance(value, Mapping) for value in parameters.values.values())
    if by_type != (layer_type is not None) and parameters.values:
        allowed = "an object for each type of layer" if layer_type else "one object for all layers"
        raise f.wrong("rope_parameters", allowed)
    return parameters if layer_type is None else parameters.nested(layer_type)


def kind_of(scaling: Fields) -> str:
    """Return the kind of rotary embedding under its present name."""
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    return {"su": "longrope"}.get(kind, kind)  # Phi-3's first name for it


def scaled_rope(f: Fields, scaling: Fields, plain: RopeSpec) -> RopeSpec:
    """Return ``plain`` with the kind and the parameters that ``scaling`` names."""
    kind = kind_of(scaling)
    if kind not in KINDS:
        raise UnsupportedModelError(
            f"{scaling.where}: RoPE of type {kind!r} is not supported; supported are {', '.join(KINDS)}."
        )
    if kind == "default":
        return plain
    longest = f.integer("max_position_embeddings")
    original = longest
    if kind != "dynamic":  # dynamic NTK is relative to max_position_embeddings
        stated = f.integer("original_max_position_embeddings", longest)
        if not f.has("original_max_position_embeddings"):
            stated = scaling.integer("original_max_position_embeddings", longest)
        original = stated
    ratio = longest / original if kind in ("yarn", "longrope") else None
    factor = scaling.number("factor", ratio)
    spec = replace(plain, kind=cast(Kind, kind), original_max_position=original, factor=factor)
    if kind == "llama3":
        low = scaling.number("low_freq_factor")
        high = scaling.number("high_freq_factor")
        if low >= high:
            raise scaling.wrong("high_freq_factor", f"greater than low_freq_factor = {low}")
        return replace(spec, low_freq_factor=low, high_freq_factor=high)
    if kind == "yarn":
        return _yarn(scaling, spec)
    if kind == "longrope":
        return _longrope(scaling, spec)
    return spec


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return the temperature of YaRN: 0.1 · mscale · ln(factor) + 1, and 1 without stretching."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(scaling: Fields, spec: RopeSpec) -> RopeSpec:
    mscale = scaling.optional_number("mscale", positive=False) or 0.0
    all_dim = scaling.optional_number("mscale_all_dim", positive=False) or 0.0
    attention_factor = scaling.optional_number("attention_factor")
    if attention_factor is None:
        attention_factor = yarn_mscale(spec.factor)
        if mscale and all_dim:
            attention_factor = yarn_mscale(spec.factor, mscale) / yarn_mscale(spec.factor, all_dim)
    return replace(
        spec,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        truncate=scaling.flag("truncate", True),
        attention_factor=attention_factor,
        mscale=mscale,
        mscale_all_dim=all_dim,
    )


def _longrope(scaling: Fields, spec: RopeSpec) -> RopeSpec:
    attention_factor = scaling.optional_number("attention_factor")
    if attention_factor is None:
        growth = math.log(spec.factor) / math.log(spec.original_max_position) if spec.factor > 1.0 else 0.0
        attention_factor = math.sqrt(1.0 + growth)
    return replace(
        spec,
        attention_factor=attention_factor,
        short_factor=scaling.numbers("short_factor", spec.dim // 2),
        long_factor=scaling.numbers("long_factor", spec.dim // 2),
    )
