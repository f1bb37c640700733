"""Llama, and families that are Llama but for a few words: Granite, OLMo 2, SmolLM3."""

from __future__ import annotations

from quire.families.family import Family
from quire.families.fields import Fields
from quire.families.rope import rope_from_config
from quire.families.shape import activation, assemble, attention, head_dim_of, layer_types, window_of
from quire.families.weights import LLAMA_NAMES, WeightMap, build_map
from quire.modelspec import LayerSpec, MlpSpec, ModelSpec

_POST_NORM_NAMES = {
    **LLAMA_NAMES,
    "attn_post_norm.weight": "post_attention_layernorm.weight",
    "mlp_post_norm.weight": "post_feedforward_layernorm.weight",
}


def read_llama(f: Fields) -> ModelSpec:
    """Llama 2, 3, 3.1, 3.2, 3.3 (Touvron et al. 2023; Grattafiori et al. 2024) and all that took its architecture."""
    bias = f.flag("attention_bias", False)
    layer = LayerSpec(
        attention(f, rope=rope_from_config(f, head_dim_of(f)), qkv_bias=bias, o_bias=bias),
        MlpSpec(f.integer("intermediate_size"), activation(f), f.flag("mlp_bias", False)),
    )
    return assemble(f, "llama", [layer] * f.integer("num_hidden_layers"))


def read_granite(f: Fields) -> ModelSpec:
    """IBM Granite 3 (dense): Llama with multipliers on embedding, attention, residual and logits."""
    bias = f.flag("attention_bias", False)
    layer = LayerSpec(
        attention(
            f,
            rope=rope_from_config(f, head_dim_of(f)),
            scale=f.number("attention_multiplier", 1.0),
            qkv_bias=bias,
            o_bias=bias,
        ),
        MlpSpec(f.integer("intermediate_size"), activation(f), f.flag("mlp_bias", False)),
    )
    return assemble(
        f,
        "granite",
        [layer] * f.integer("num_hidden_layers"),
        embedding_scale=f.number("embedding_multiplier", 1.0),
        residual_scale=f.number("residual_multiplier", 1.0),
        logits_scale=1.0 / f.number("logits_scaling", 1.0),
    )


def read_olmo2(f: Fields) -> ModelSpec:
    """OLMo 2 (arXiv:2501.00656): norms after the blocks, RMSNorm over the whole projection of q and of k."""
    bias = f.flag("attention_bias", False)
    rope = rope_from_config(f, head_dim_of(f))
    layer = LayerSpec(
        attention(f, rope=rope, qkv_bias=bias, o_bias=bias, qk_norm="full"),
        MlpSpec(f.integer("intermediate_size"), activation(f)),
        norms="post",
    )
    return assemble(f, "olmo2", [layer] * f.integer("num_hidden_layers"))


def olmo2_weights(spec: ModelSpec) -> WeightMap:
    return build_map(spec, _POST_NORM_NAMES)


def read_smollm3(f: Fields) -> ModelSpec:
    """SmolLM3: Llama in which every fourth layer has no position embedding (NoPE, arXiv:2501.18795)."""
    count = f.integer("num_hidden_layers")
    interval = f.integer("no_rope_layer_interval", 4)
    has_rope = [bool(item) for item in f.integers("no_rope_layers")]  # 1 where the layer does rotate
    has_rope = has_rope or [(i + 1) % interval != 0 for i in range(count)]
    if len(has_rope) != count:
        raise f.wrong("no_rope_layers", f"a list of num_hidden_layers = {count} entries")
    slides = f.flag("use_sliding_window", False) and f.has("sliding_window")
    kinds = layer_types(
        f, ["sliding_attention" if slides and not rotates else "full_attention" for rotates in has_rope]
    )
    rope = rope_from_config(f, head_dim_of(f), default_theta=2e6)
    bias = f.flag("attention_bias", False)
    mlp = MlpSpec(f.integer("intermediate_size"), activation(f), f.flag("mlp_bias", False))
    layers = []
    for rotates, kind in zip(has_rope, kinds, strict=True):
        window = window_of(f, kind) if slides else None
        layers.append(
            LayerSpec(
                attention(f, rope=rope if rotates else None, window=window, qkv_bias=bias, o_bias=bias), mlp
            )
        )
    return assemble(f, "smollm3", layers, tied=True)


LLAMA = Family("llama", "LlamaForCausalLM", read_llama, build_map)
GRANITE = Family("granite", "GraniteForCausalLM", read_granite, build_map)
OLMO2 = Family("olmo2", "Olmo2ForCausalLM", read_olmo2, olmo2_weights)
SMOLLM3 = Family("smollm3", "SmolLM3ForCausalLM", read_smollm3, build_map)
