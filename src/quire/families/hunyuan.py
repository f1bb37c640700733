"""HunYuan 0.5B … 7B (Tencent 2025, dense): Llama with norms of q and k behind the rotation.

Its rotary embedding is named "dynamic" and has an ``alpha``, by which the base frequency is stretched once and for all.
"""

from __future__ import annotations

from quire.families.rope import kind_of, rope_from_config, scaling_fields
from quire.families.shape import Fields, assemble, attention, biases, dense, head_dim_of
from quire.families.weights import LLAMA_NAMES, Family, WeightMap, build_map
from quire.modelspec import LayerSpec, ModelSpec
from quire.rope_spec import RopeSpec

_NAMES = {
    **LLAMA_NAMES,
    "attn.q_norm.weight": "self_attn.query_layernorm.weight",
    "attn.k_norm.weight": "self_attn.key_layernorm.weight",
}


def read_hunyuan_v1_dense(f: Fields) -> ModelSpec:
    attn = attention(f, rope=_rope(f), qk_norm="rotated", **biases(f))
    return assemble(f, "hunyuan_v1_dense", LayerSpec(attn, dense(f)), eps=1e-5)


def _rope(f: Fields) -> RopeSpec:
    head_dim, scaling = head_dim_of(f), scaling_fields(f)
    alpha = scaling.optional_number("alpha", positive=False)
    rope = rope_from_config(f, head_dim)
    if not alpha or kind_of(scaling) != "dynamic":
        return rope
    return RopeSpec(rope.theta * scaling.number("alpha") ** (head_dim / (head_dim - 2)), head_dim)


def weights(spec: ModelSpec) -> WeightMap:
    return build_map(spec, _NAMES)


HUNYUAN_V1_DENSE = Family("hunyuan_v1_dense", read_hunyuan_v1_dense, weights)
