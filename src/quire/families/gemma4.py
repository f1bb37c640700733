"""Gemma 4 (2026), the text decoder: wider heads in global layers, embeddings per layer, layers that share K and V."""

from __future__ import annotations

from dataclasses import replace

from quire.families.rope import rope_from_config
from quire.families.shape import Fields, activation, assemble, biases, layer_types, soft_cap, window_of
from quire.families.weights import (
    LLAMA_NAMES,
    SANDWICH_NORMS,
    TOP_NAMES,
    Family,
    Take,
    WeightMap,
    build_map,
    expert_takes,
)
from quire.modelspec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec, PerLayerSpec

_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
_NAMES = {
    **LLAMA_NAMES,
    **SANDWICH_NORMS,
    "per_layer.scale": "layer_scalar",
    "per_layer.gate.weight": "per_layer_input_gate.weight",
    "per_layer.out.weight": "per_layer_projection.weight",
    "per_layer.norm.weight": "post_per_layer_input_norm.weight",
    "moe.router.weight": "router.proj.weight",
    "moe.router_norm.weight": "router.scale",
    "moe.expert_scale": "router.per_expert_scale",
    "moe.norm.weight": "pre_feedforward_layernorm_2.weight",
    "moe.post_norm.weight": "post_feedforward_layernorm_2.weight",
    "moe.shared_post_norm.weight": "post_feedforward_layernorm_1.weight",
    **{f"moe.shared.{n}.weight": f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")},
}
_TOP = {
    **TOP_NAMES,
    "per_layer.table.weight": "model.embed_tokens_per_layer.weight",
    "per_layer.projection.weight": "model.per_layer_model_projection.weight",
    "per_layer.norm.weight": "model.per_layer_projection_norm.weight",
}
# Which keys decide about tensors, beside those of other families.
_SHARED = ("num_kv_shared_layers", "layer_types")
_KEYS = (
    (r"self_attn\.(v_proj|k_proj|q_proj|o_proj|q_norm|k_norm)\.weight",
     (*_SHARED, "attention_k_eq_v", "per_layer_config", "global_head_dim", "num_global_key_value_heads")),
    (r"(experts|router)\..*", ("enable_moe_block", "num_experts", "moe_intermediate_size")),
    (r"mlp\.\w+\.weight", ("use_double_wide_mlp", *_SHARED)),
    (r"per_layer\w*\.weight", ("hidden_size_per_layer_input", "vocab_size_per_layer_input")),
)  # fmt: skip


def read_gemma4(f: Fields) -> ModelSpec:
    f.refuse("rope_local_base_freq", unless=(), why="a key of Gemma 3; rope_parameters says it here")
    kinds = _kinds(f)
    count, shared = len(kinds), f.integer("num_kv_shared_layers", 0, minimum=0)
    if shared >= count or set(kinds[: count - shared]) != set(kinds):
        raise f.wrong(
            "num_kv_shared_layers",
            "so few that a layer of each of layer_types before them has its own K and V",
        )
    wide = f.flag("use_double_wide_mlp", False)
    sizes, layers = _sizes(f, kinds), []
    for index, kind in enumerate(kinds):
        reads = max(i for i in range(count - shared) if kinds[i] == kind) if index >= count - shared else None
        attn = _attention(f, kind, *sizes[index], reads)
        inter = f.integer("intermediate_size", 9216) * (2 if wide and reads is not None else 1)
        act = activation(f, "hidden_activation", "gelu_pytorch_tanh")
        moe = _experts(f, inter) if f.flag("enable_moe_block", False) else None
        mlp = MlpSpec(inter if moe is None else moe.intermediate_size, act, moe=moe)
        layers.append(LayerSpec(attn, mlp, "sandwich"))
    size = f.integer("hidden_size_per_layer_input", 256, minimum=0)
    per_layer = PerLayerSpec(size, f.integer("vocab_size_per_layer_input", 262_144) if size else 0)
    return assemble(
        f, "gemma4", layers, tied=True, embedding_scale=f.integer("hidden_size") ** 0.5, per_layer=per_layer,
        logits_soft_cap=soft_cap(f, "final_logit_softcapping"),
    )  # fmt: skip


def _experts(f: Fields, inter: int) -> MoeSpec:
    """Return the experts of 26B-A4B; ``inter``: the width of the dense block next to them."""
    moe = MoeSpec(
        f.integer("num_experts"), f.integer("top_k_experts"), f.integer("moe_intermediate_size"),
        shared_intermediate_size=inter, own_norms=True,
    )  # fmt: skip
    if moe.top_k > moe.num_experts:
        raise f.wrong("top_k_experts", f"at most the {moe.num_experts} experts")
    return moe


def _kinds(f: Fields) -> tuple[str, ...]:
    """Return the type of each layer; the last one is global, whatever the file says."""
    count = f.integer("num_hidden_layers")
    kinds = layer_types(f, ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(count)])
    return (*kinds[:-1], "full_attention")


def _sizes(f: Fields, kinds: tuple[str, ...]) -> list[tuple[int, int]]:
    """Return (size of a head, KV heads) of each layer: those of global layers are written in one of two ways."""
    local = f.integer("head_dim", 256), f.integer("num_key_value_heads", 4)
    own_keys = f.flag("attention_k_eq_v", False)
    full = (
        f.integer("global_head_dim", 512),
        f.integer("num_global_key_value_heads", local[1]) if own_keys else local[1],
    )
    overrides = f.nested("per_layer_config")
    if overrides is None:
        return [full if kind == "full_attention" else local for kind in kinds]
    sizes = []
    for index in range(len(kinds)):
        one = overrides.nested(str(index)) or Fields({}, overrides.where)
        for key in one.values.keys() - {"head_dim", "num_key_value_heads"}:
            raise one.wrong(key, "absent: layers differ in head_dim and num_key_value_heads alone")
        sizes.append((one.integer("head_dim", local[0]), one.integer("num_key_value_heads", local[1])))
    if len(set(zip(kinds, sizes, strict=True))) > len(set(kinds)):
        raise f.wrong("per_layer_config", "equal sizes for layers of one type, as layer_types has them")
    return sizes


def _attention(f: Fields, kind: str, head_dim: int, kv_heads: int, reads: int | None) -> AttentionSpec:
    heads, is_full = f.integer("num_attention_heads", 8), kind == "full_attention"
    if heads % kv_heads:
        raise f.wrong("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    values = f.values
    parameters = f.nested("rope_parameters")
    if parameters is None:
        values = {**values, "rope_parameters": _ROPE}
    else:
        of_kind = parameters.nested(kind)
        if of_kind is None or not of_kind.has("rope_theta"):
            raise f.wrong("rope_parameters", f"an object with {kind}, which has rope_theta")
    rope = rope_from_config(Fields(values, f.where), head_dim, layer_type=kind)
    return AttentionSpec(
        heads, kv_heads, head_dim, head_dim, 1.0, rope, window_of(f, kind, 512), qk_norm="head", v_norm=True,
        v_from_k=is_full and f.flag("attention_k_eq_v", False), kv_layer=reads, **biases(f),
    )  # fmt: skip


def weights(spec: ModelSpec) -> WeightMap:
    """Ignore what some files hold of layers that read another's K and V."""
    shared = "|".join(str(i) for i in range(spec.num_layers) if spec.kv_source(i) != i)
    extra = (rf"model\.layers\.({shared})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*",) if shared else ()
    return replace(build_map(spec, _NAMES, _rules, extra, top=_TOP), keys=_KEYS)


def _rules(spec: ModelSpec, index: int, prefix: str) -> dict[str, tuple[Take, ...]]:
    """`LayerRules`: experts, fused or each by itself."""
    if spec.layers[index].mlp.moe is None:
        return {}
    folder = f"{prefix}experts."
    return expert_takes(spec, index, folder, ("gate_proj", "up_proj", "down_proj"), folder)


GEMMA4 = Family("gemma4", read_gemma4, weights)
