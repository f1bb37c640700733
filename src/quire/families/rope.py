"""Rotary embeddings as configurations write them: ``rope_parameters`` (transformers 5) or ``rope_theta`` with
``rope_scaling`` (before), → `RopeSpec`.

Factors that multiply cos and sin are computed here, so that code that makes the frequencies needs no formula:
YaRN (Peng et al. 2023, arXiv:2309.00071, §3.4) and LongRoPE (Ding et al. 2024, arXiv:2402.13753).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, cast

from quire.errors import UnsupportedModelError
from quire.families.shape import Fields
from quire.modelspec import RopeSpec

KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
Kind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]


def rope_from_config(
    f: Fields, head_dim: int, *, default_theta: float = 10_000.0, layer_type: str | None = None,
    interleaved: bool = False,
) -> RopeSpec:  # fmt: skip
    """Read the rotary embedding of the layers of ``layer_type`` (None: of all layers) from a whole ``config.json``."""
    scaling = scaling_fields(f, layer_type)
    theta = scaling.number("rope_theta", f.number("rope_theta", default_theta))
    partial = scaling.number("partial_rotary_factor", f.number("partial_rotary_factor", 1.0))
    dim = int(head_dim * partial)
    if dim % 2 or not 0 < dim <= head_dim:
        raise f.wrong("partial_rotary_factor", f"such that an even part of head_dim = {head_dim} is rotated")
    return scaled_rope(f, scaling, RopeSpec(theta, dim, interleaved=interleaved))


def scaling_fields(f: Fields, layer_type: str | None = None) -> Fields:
    """Return the object that holds the kind and its parameters: empty when the configuration has none."""
    parameters = f.nested("rope_parameters")
    if parameters is None:
        return f.nested("rope_scaling") or Fields({}, f"{f.where}, rope_scaling")
    if layer_type is not None and parameters.has(layer_type):
        return parameters.nested(layer_type) or parameters
    return parameters


def scaled_rope(f: Fields, scaling: Fields, plain: RopeSpec) -> RopeSpec:
    """Return ``plain`` with the kind and the parameters that ``scaling`` names."""
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    kind = {"su": "longrope"}.get(kind, kind)  # Phi-3's first name for it
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
