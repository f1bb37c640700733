"""Llama, and families that differ from it in a few details.

Granite, SmolLM3, ERNIE 4.5, Seed-OSS, Mistral, Mixtral, Phi-3.
"""

from __future__ import annotations

from quire.families.rope import rope_from_config, scaling_fields
from quire.families.shape import (
    Fields,
    activation,
    assemble,
    attention,
    biases,
    dense,
    head_dim_of,
    layer_types,
    uniform_window,
    window_of,
)  # fmt: skip
from quire.families.weights import (
    LLAMA_NAMES,
    Family,
    Take,
    WeightMap,
    build_map,
    expert_takes,
    fused_gate_up,
)
from quire.modelspec import LayerSpec, MlpSpec, ModelSpec, MoeSpec


def read_llama(f: Fields) -> ModelSpec:
    """Llama 2, 3, 3.1, 3.2, 3.3 (Touvron et al. 2023; Grattafiori et al. 2024) and models of the same architecture."""
    attn = attention(f, rope=rope_from_config(f, head_dim_of(f)), **biases(f))
    return assemble(f, "llama", LayerSpec(attn, dense(f, bias=f.flag("mlp_bias", False))))


def read_granite(f: Fields) -> ModelSpec:
    """IBM Granite 3 (dense): Llama with multipliers on embedding, attention, residual and logits."""
    rope, scale = rope_from_config(f, head_dim_of(f)), f.number("attention_multiplier", 1.0)
    layer = LayerSpec(
        attention(f, rope=rope, scale=scale, **biases(f)), dense(f, bias=f.flag("mlp_bias", False))
    )
    return assemble(
        f, "granite", layer,
        embedding_scale=f.number("embedding_multiplier", 1.0),
        residual_scale=f.number("residual_multiplier", 1.0),
        logits_scale=1.0 / f.number("logits_scaling", 1.0),
    )  # fmt: skip


def read_ernie4_5(f: Fields) -> ModelSpec:
    """ERNIE 4.5 (dense): Llama whose rotary embedding turns neighbouring pairs."""
    bias = f.flag("use_bias", False)
    head_dim = f.integer("head_dim", 128)
    rope = rope_from_config(f, head_dim, default_theta=5e5, interleaved=True)
    attn = attention(f, rope=rope, head_dim=head_dim, qkv_bias=bias, o_bias=bias)
    return assemble(f, "ernie4_5", LayerSpec(attn, dense(f, bias=bias)), tied=True, eps=1e-5)


def read_seed_oss(f: Fields) -> ModelSpec:
    """Seed-OSS 36B: Llama with biases on q, k and v."""
    head_dim = f.integer("head_dim", 128)
    attn = attention(
        f, rope=rope_from_config(f, head_dim), head_dim=head_dim, qkv_bias=f.flag("attention_bias", True),
        o_bias=f.flag("attention_out_bias", False),
    )  # fmt: skip
    return assemble(f, "seed_oss", LayerSpec(attn, dense(f, bias=f.flag("mlp_bias", False))))


def read_smollm3(f: Fields) -> ModelSpec:
    """SmolLM3: Llama in which every fourth layer has no position embedding (NoPE, arXiv:2501.18795)."""
    count = f.integer("num_hidden_layers")
    interval = f.integer("no_rope_layer_interval", 4)
    has_rope = [bool(item) for item in f.integers("no_rope_layers")]  # 1 where the layer has RoPE
    has_rope = has_rope or [(i + 1) % interval != 0 for i in range(count)]
    if len(has_rope) != count:
        raise f.wrong("no_rope_layers", f"a list of num_hidden_layers = {count} entries")
    slides = f.flag("use_sliding_window", False) and f.has("sliding_window")
    kinds = layer_types(
        f, ["sliding_attention" if slides and not rotates else "full_attention" for rotates in has_rope]
    )
    rope = rope_from_config(f, head_dim_of(f), default_theta=2e6)
    mlp = dense(f, bias=f.flag("mlp_bias", False))
    layers = []
    for rotates, kind in zip(has_rope, kinds, strict=True):
        window = window_of(f, kind) if slides else None
        layers.append(
            LayerSpec(attention(f, rope=rope if rotates else None, window=window, **biases(f)), mlp)
        )
    return assemble(f, "smollm3", layers, tied=True)


LLAMA = Family("llama", read_llama, build_map)
GRANITE = Family("granite", read_granite, build_map)
ERNIE4_5 = Family("ernie4_5", read_ernie4_5, build_map)
SEED_OSS = Family("seed_oss", read_seed_oss, build_map)
SMOLLM3 = Family("smollm3", read_smollm3, build_map)


def read_mistral(f: Fields) -> ModelSpec:
    """Mistral 7B and its successors (Jiang et al. 2023): Llama with one sliding window for all layers, or none."""
    attn = attention(f, rope=rope_from_config(f, head_dim_of(f)), window=uniform_window(f, 4096))
    return assemble(f, "mistral", LayerSpec(attn, dense(f)))


def read_mixtral(f: Fields) -> ModelSpec:
    """Mixtral 8x7B and 8x22B (arXiv:2401.04088): Mistral with two of eight experts per token."""
    moe = MoeSpec(
        num_experts=f.integer("num_local_experts", 8),
        top_k=f.integer("num_experts_per_tok", 2),
        intermediate_size=f.integer("intermediate_size"),
    )
    if moe.top_k > moe.num_experts:
        raise f.wrong("num_experts_per_tok", f"at most num_local_experts = {moe.num_experts}")
    rope = rope_from_config(f, head_dim_of(f), default_theta=1e6)
    mlp = MlpSpec(moe.intermediate_size, activation(f), moe=moe)
    layer = LayerSpec(attention(f, rope=rope, window=uniform_window(f)), mlp)
    return assemble(f, "mixtral", layer, eps=1e-5)


def _mixtral_rules(spec: ModelSpec, index: int, prefix: str) -> dict[str, tuple[Take, ...]]:
    moe = spec.layers[index].mlp.moe
    assert moe is not None
    folder = f"{prefix}block_sparse_moe."
    takes = expert_takes(spec, index, f"{folder}experts.", ("w1", "w3", "w2"), f"{prefix}mlp.experts.")
    shape = (moe.num_experts, spec.hidden_size)
    takes["moe.router.weight"] = (
        Take((f"{folder}gate.weight",), shape),
        Take((f"{prefix}mlp.gate.weight",), shape),
    )
    return takes


def mixtral_weights(spec: ModelSpec) -> WeightMap:
    return build_map(spec, LLAMA_NAMES, _mixtral_rules)


MISTRAL = Family("mistral", read_mistral, build_map)
MIXTRAL = Family("mixtral", read_mixtral, mixtral_weights)


def read_phi3(f: Fields) -> ModelSpec:
    """Phi-3, Phi-3.5 mini and Phi-4 (arXiv:2404.14219): fused projections and, for long contexts, LongRoPE."""
    f = _longrope_by_its_old_name(f)
    rope = rope_from_config(f, head_dim_of(f), partial=True)
    if rope.kind not in ("default", "longrope"):
        raise scaling_fields(f).wrong("rope_type", "'default' or 'longrope', the kinds of Phi-3")
    return assemble(
        f, "phi3", LayerSpec(attention(f, rope=rope, window=uniform_window(f)), dense(f)), eps=1e-5
    )


def _longrope_by_its_old_name(f: Fields) -> Fields:
    """Return the fields with the type "longrope": the first releases wrote "yarn" or "su" beside its factors."""
    values = dict(f.values)
    for key in ("rope_scaling", "rope_parameters"):
        scaling = f.nested(key)
        if scaling is not None and scaling.has("long_factor"):
            values[key] = {**scaling.values, "rope_type": "longrope"}
    return Fields(values, f.where)


def fused_takes(spec: ModelSpec, index: int, qkv_name: str, gate_up_name: str) -> dict[str, tuple[Take, ...]]:
    """Return takes from fused projections: the rows of one are q, k, v, those of the other gate, up."""
    layer, hidden = spec.layers[index], spec.hidden_size
    a = layer.attention
    q_rows, kv_rows = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    qkv = (qkv_name,)
    shape = (q_rows + 2 * kv_rows, hidden)
    return {
        "attn.q.weight": (Take(qkv, shape, stop=q_rows),),
        "attn.k.weight": (Take(qkv, shape, start=q_rows, stop=q_rows + kv_rows),),
        "attn.v.weight": (Take(qkv, shape, start=q_rows + kv_rows, stop=shape[0]),),
        **fused_gate_up(spec, index, gate_up_name),
    }


def _phi3_rules(spec: ModelSpec, index: int, prefix: str) -> dict[str, tuple[Take, ...]]:
    return fused_takes(spec, index, f"{prefix}self_attn.qkv_proj.weight", f"{prefix}mlp.gate_up_proj.weight")


def phi3_weights(spec: ModelSpec) -> WeightMap:
    return build_map(spec, LLAMA_NAMES, _phi3_rules)


PHI3 = Family("phi3", read_phi3, phi3_weights)
