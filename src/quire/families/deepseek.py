"""DeepSeek-V2 (arXiv:2405.04434) and V3 / R1 (arXiv:2412.19437): latent attention, grouped routing, shared experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.families.rope import rope_from_config, yarn_mscale
from quire.families.shape import Fields, activation, assemble
from quire.families.weights import LLAMA_NAMES, Family, WeightMap, build_map, expert_rules
from quire.modelspec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec

NAMES = {
    **LLAMA_NAMES,
    "attn.q_a.weight": "self_attn.q_a_proj.weight",
    "attn.q_b.weight": "self_attn.q_b_proj.weight",
    "attn.q_a_norm.weight": "self_attn.q_a_layernorm.weight",
    "attn.kv_a.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attn.kv_b.weight": "self_attn.kv_b_proj.weight",
    "attn.kv_a_norm.weight": "self_attn.kv_a_layernorm.weight",
    "moe.correction_bias": "mlp.gate.e_score_correction_bias",
    **{f"moe.shared.{n}.weight": f"mlp.shared_experts.{n}_proj.weight" for n in ("gate", "up", "down")},
}


def read_v2(f: Fields) -> ModelSpec:
    f.refuse("topk_method", unless=("greedy", "group_limited_greedy"), why="routing of DeepSeek-V2")
    f.refuse("scoring_func", unless=("softmax",), why="routing of DeepSeek-V2")
    f.refuse("norm_topk_prob", unless=(False,), why="the published code and transformers disagree on it")
    grouped = f.text("topk_method", "greedy") == "group_limited_greedy"
    moe = mixture_sizes(
        f,
        scoring="softmax",
        normalize_topk=False,
        routed_scale=f.number("routed_scaling_factor", 1.0),
        num_groups=f.integer("n_group", 1) if grouped else 1,
        topk_groups=f.integer("topk_group", 1) if grouped else 1,
        group_score="max",
    )
    return _assemble(f, "deepseek_v2", moe)


def read_v3(f: Fields) -> ModelSpec:
    f.refuse("topk_method", unless=("noaux_tc",), why="routing of DeepSeek-V3")
    f.refuse("scoring_func", unless=("sigmoid",), why="routing of DeepSeek-V3")
    f.refuse("rope_interleave", unless=(True,), why="the rotary layout of DeepSeek-V3")
    if f.is_null("rope_interleave"):
        raise f.wrong("rope_interleave", "true, or left out: null is read as false elsewhere")
    moe = mixture_sizes(
        f,
        scoring="sigmoid",
        normalize_topk=f.flag("norm_topk_prob", not f.is_null("norm_topk_prob")),
        routed_scale=f.number("routed_scaling_factor", 2.5),
        correction_bias=True,
        num_groups=f.integer("n_group", 8),
        topk_groups=f.integer("topk_group", 4),
        group_score="top2_sum",
    )
    return _assemble(f, "deepseek_v3", moe)


def mixture_sizes(f: Fields, **routing: Any) -> MoeSpec:
    """Return routed and shared experts as this family's configurations give them; ``routing``: further fields."""
    inter = f.integer("moe_intermediate_size")
    return MoeSpec(
        num_experts=f.integer("n_routed_experts"),
        top_k=f.integer("num_experts_per_tok"),
        intermediate_size=inter,
        shared_intermediate_size=inter * f.integer("n_shared_experts", 0, minimum=0),
        **routing,
    )


def _assemble(f: Fields, family: str, moe: MoeSpec) -> ModelSpec:
    f.refuse("attention_bias", unless=(False,), why="no published DeepSeek model has it")
    f.refuse("moe_layer_freq", unless=(1,), why="no published DeepSeek model skips layers")
    count, first = f.integer("num_hidden_layers"), f.integer("first_k_dense_replace", 0, minimum=0)
    attn = latent_attention(f, interleaved=True)
    return assemble_mixture(f, family, attn, moe, [i >= first for i in range(count)])


def assemble_mixture(
    f: Fields, family: str, attn: AttentionSpec, moe: MoeSpec, is_sparse: Sequence[bool], *, eps: float = 1e-6
) -> ModelSpec:
    """Check the routing and put layers together, with experts where ``is_sparse``; ``eps``: as in `assemble`."""
    check_routing(f, moe)
    act = activation(f)
    dense = LayerSpec(attn, MlpSpec(f.integer("intermediate_size"), act))
    sparse = LayerSpec(attn, MlpSpec(moe.intermediate_size, act, moe=moe))
    return assemble(f, family, [sparse if has_experts else dense for has_experts in is_sparse], eps=eps)


def check_routing(f: Fields, moe: MoeSpec) -> None:
    """Raise `ModelLoadError` for groups of experts from which no token can choose."""
    if moe.num_experts % moe.num_groups or moe.topk_groups > moe.num_groups:
        raise f.wrong("n_group", f"a divisor of n_routed_experts = {moe.num_experts}, at least topk_group")
    if moe.group_score == "top2_sum" and moe.num_experts < 2 * moe.num_groups:
        raise f.wrong(
            "n_group", f"at most half of n_routed_experts = {moe.num_experts}: a group is scored by two"
        )
    if moe.top_k > moe.num_experts * moe.topk_groups // moe.num_groups:
        raise f.wrong("num_experts_per_tok", "at most the experts of topk_group groups")


def latent_attention(f: Fields, *, interleaved: bool) -> AttentionSpec:
    """Return multi-head latent attention; ``interleaved``: neighbouring pairs of the rope key rotate."""
    nope, rope_dim = f.integer("qk_nope_head_dim"), f.integer("qk_rope_head_dim")
    if rope_dim % 2:
        raise f.wrong("qk_rope_head_dim", "an even integer")
    rope = rope_from_config(f, rope_dim, interleaved=interleaved)
    scale = (nope + rope_dim) ** -0.5
    if rope.kind != "default" and rope.mscale_all_dim:  # YaRN's temperature on the scores of all dimensions
        scale *= yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
    heads = f.integer("num_attention_heads")
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=nope + rope_dim,
        v_head_dim=f.integer("v_head_dim"),
        scale=scale,
        rope=rope,
        q_lora_rank=f.integer("q_lora_rank", 0, minimum=0),
        kv_lora_rank=f.integer("kv_lora_rank"),
        qk_nope_head_dim=nope,
    )


def weights(spec: ModelSpec) -> WeightMap:
    """Ignore layers from ``num_hidden_layers`` on: heads for multi-token prediction, which the decoder does not use."""
    extra = rf"model\.layers\.{spec.num_layers}\..*"
    return build_map(spec, NAMES, expert_rules, ignore=(extra,))


DEEPSEEK_V2 = Family("deepseek_v2", read_v2, weights)
DEEPSEEK_V3 = Family("deepseek_v3", read_v3, weights)
