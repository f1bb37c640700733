"""Ministral 3 (2025) and Mistral Small 4 (2026): queries are scaled by their position, as in Llama 4.

Ministral 3 is Mistral otherwise; Mistral Small 4 has the latent attention of DeepSeek and experts chosen by softmax.
"""

from __future__ import annotations

from dataclasses import replace

from quire.families.deepseek import NAMES, assemble_mixture, latent_attention, mixture_sizes
from quire.families.rope import kind_of, rope_from_config, scaling_fields
from quire.families.shape import Fields, assemble, attention, dense, uniform_window
from quire.families.weights import Family, WeightMap, build_map, expert_rules
from quire.modelspec import LayerSpec, ModelSpec
from quire.rope_spec import RopeSpec

# What transformers has where a file says nothing.
_YARN = {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
_MINISTRAL = {"rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16_384}
_MISTRAL_4 = {"rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192}


def read_ministral3(f: Fields) -> ModelSpec:
    """Ministral 3 3B, 8B and 14B."""
    f = _with_rope(f, _MINISTRAL)
    head_dim = f.integer("head_dim", 128)
    rope = _scaled(f, rope_from_config(f, head_dim))
    attn = attention(f, rope=rope, head_dim=head_dim, window=uniform_window(f))
    return assemble(f, "ministral3", LayerSpec(attn, dense(f)), eps=1e-5)


def read_mistral4(f: Fields) -> ModelSpec:
    """Mistral Small 4."""
    f = _with_rope(f, _MISTRAL_4)
    f.refuse("attention_bias", unless=(False,), why="no published Mistral has it")
    attn = latent_attention(_of_whole_part(f), interleaved=f.flag("rope_interleave", True))
    assert attn.rope is not None
    attn = replace(attn, rope=_scaled(f, attn.rope))
    moe = mixture_sizes(
        f,
        scoring="softmax",
        normalize_topk=f.flag("norm_topk_prob", not f.is_null("norm_topk_prob")),
        routed_scale=f.number("routed_scaling_factor", 1.0),
        num_groups=f.integer("n_group", 1),
        topk_groups=f.integer("topk_group", 1),
        group_score="top2_sum",
    )
    count, first = f.integer("num_hidden_layers"), f.integer("first_k_dense_replace", 0, minimum=0)
    return assemble_mixture(f, "mistral4", attn, moe, [index >= first for index in range(count)])


def _with_rope(f: Fields, default: dict[str, float]) -> Fields:
    """Return the fields with the family's rotary embedding where the file names none."""
    if f.has("rope_parameters") or f.has("rope_scaling"):
        return f
    return Fields({**f.values, "rope_parameters": {**_YARN, **default}}, f.where)


def _scaled(f: Fields, rope: RopeSpec) -> RopeSpec:
    scaling = scaling_fields(f)
    beta = scaling.number("llama_4_scaling_beta", positive=False)
    return replace(rope, query_scale=(beta, scaling.integer("original_max_position_embeddings")))


def _of_whole_part(f: Fields) -> Fields:
    """Return the fields without the part of a head that turns, which the sizes say as well."""
    if kind_of(scaling_fields(f)) == "default":
        raise scaling_fields(f).wrong("rope_type", "a kind that stretches, such as 'yarn'")
    turns = f.integer("qk_rope_head_dim")
    part = turns / (turns + f.integer("qk_nope_head_dim"))
    values = dict(f.values)
    for key in ("rope_parameters", "rope_scaling"):
        scaling = f.nested(key)
        if scaling is not None:
            if abs(scaling.number("partial_rotary_factor", part) - part) > 1e-6:
                raise scaling.wrong("partial_rotary_factor", f"{part:g}, the share of qk_rope_head_dim")
            values[key] = {k: v for k, v in scaling.values.items() if k != "partial_rotary_factor"}
    if abs(f.number("partial_rotary_factor", part) - part) > 1e-6:
        raise f.wrong("partial_rotary_factor", f"{part:g}, the share of qk_rope_head_dim")
    return Fields({k: v for k, v in values.items() if k != "partial_rotary_factor"}, f.where)


def mistral4_weights(spec: ModelSpec) -> WeightMap:
    return build_map(spec, NAMES, expert_rules)


MINISTRAL3 = Family("ministral3", read_ministral3, build_map)
MISTRAL4 = Family("mistral4", read_mistral4, mistral4_weights)
