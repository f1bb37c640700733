"""GLM-4 (arXiv:2406.12793), GLM-4.5 … 4.7 (mixtures, arXiv:2508.06471) and GLM-4.7-Flash (latent attention)."""

from __future__ import annotations

from quire.families.deepseek import NAMES as LATENT_NAMES
from quire.families.deepseek import assemble_mixture, latent_attention, mixture_sizes
from quire.families.rope import rope_from_config
from quire.families.shape import Fields, assemble, attention, dense, head_dim_of
from quire.families.weights import (
    LLAMA_NAMES,
    Family,
    Take,
    WeightMap,
    build_map,
    expert_rules,
    fused_gate_up,
)
from quire.modelspec import AttentionSpec, LayerSpec, ModelSpec, MoeSpec
from quire.rope_spec import RopeSpec

_GLM4_NAMES = {
    **LLAMA_NAMES,
    "attn_post_norm.weight": "post_self_attn_layernorm.weight",
    "mlp_post_norm.weight": "post_mlp_layernorm.weight",
}


def read_glm4(f: Fields) -> ModelSpec:
    """GLM-4-0414 and GLM-Z1: norms around both blocks, half of each head rotates in neighbouring pairs."""
    head_dim = f.integer("head_dim", 128)
    rope = _half_rotated(f, head_dim, interleaved=True)
    attn = attention(f, rope=rope, head_dim=head_dim, qkv_bias=f.flag("attention_bias", True))
    return assemble(f, "glm4", LayerSpec(attn, dense(f), norms="sandwich"), eps=1.5625e-7)


def read_glm4_moe(f: Fields) -> ModelSpec:
    """GLM-4.5, -4.5-Air, -4.6, -4.7: the experts of DeepSeek-V3 and plain attention."""
    head_dim = head_dim_of(f)
    attn = attention(
        f, rope=_half_rotated(f, head_dim), head_dim=head_dim, qkv_bias=f.flag("attention_bias", False),
        qk_norm="head" if f.flag("use_qk_norm", False) else "none",
    )  # fmt: skip
    count, first = f.integer("num_hidden_layers"), f.integer("first_k_dense_replace", 1, minimum=0)
    return assemble_mixture(
        f, "glm4_moe", attn, _routing(f, 1.0), [i >= first for i in range(count)], eps=1e-5
    )


def read_glm4_moe_lite(f: Fields) -> ModelSpec:
    """GLM-4.7-Flash: the latent attention and the experts of DeepSeek-V3."""
    count = f.integer("num_hidden_layers")
    kinds = f.texts("mlp_layer_types") or ["dense"] + ["sparse"] * (count - 1)
    if len(kinds) != count or set(kinds) - {"dense", "sparse"}:
        raise f.wrong("mlp_layer_types", f'a list of num_hidden_layers = {count} entries "dense" or "sparse"')
    f.refuse("attention_bias", unless=(False,), why="no published GLM with latent attention has it")
    attn: AttentionSpec = latent_attention(f, interleaved=f.flag("rope_interleave", True))
    is_sparse = [kind == "sparse" for kind in kinds]
    return assemble_mixture(f, "glm4_moe_lite", attn, _routing(f, 1.8), is_sparse, eps=1e-5)


def _half_rotated(f: Fields, head_dim: int, *, interleaved: bool = False) -> RopeSpec:
    """Return the rotary embedding, of half of each head where the file does not say of how much."""
    fields = f
    if not f.has("partial_rotary_factor") and not _says_how_much(f):
        fields = Fields({**f.values, "partial_rotary_factor": 0.5}, f.where)
    return rope_from_config(fields, head_dim, interleaved=interleaved, partial=True)


def _says_how_much(f: Fields) -> bool:
    parameters = f.nested("rope_parameters")
    return parameters is not None and parameters.has("partial_rotary_factor")


def _routing(f: Fields, routed_scale: float) -> MoeSpec:
    return mixture_sizes(
        f,
        scoring="sigmoid",
        normalize_topk=f.flag("norm_topk_prob", True),
        routed_scale=f.number("routed_scaling_factor", routed_scale),
        correction_bias=True,
        num_groups=f.integer("n_group", 1),
        topk_groups=f.integer("topk_group", 1),
        group_score="top2_sum",
    )


def _glm4_rules(spec: ModelSpec, index: int, prefix: str) -> dict[str, tuple[Take, ...]]:
    return fused_gate_up(spec, index, f"{prefix}mlp.gate_up_proj.weight")


def glm4_weights(spec: ModelSpec) -> WeightMap:
    return build_map(spec, _GLM4_NAMES, _glm4_rules)


def mixture_weights(spec: ModelSpec) -> WeightMap:
    """Ignore layers from ``num_hidden_layers`` on: heads for multi-token prediction, which the decoder does not use."""
    extra = rf"model\.layers\.{spec.num_layers}\..*"
    return build_map(spec, LATENT_NAMES, expert_rules, ignore=(extra,))


GLM4 = Family("glm4", read_glm4, glm4_weights)
GLM4_MOE = Family("glm4_moe", read_glm4_moe, mixture_weights)
GLM4_MOE_LITE = Family("glm4_moe_lite", read_glm4_moe_lite, mixture_weights)
