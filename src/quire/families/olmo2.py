"""OLMo 2 (arXiv:2501.00656): norms after the blocks, RMSNorm over the whole projection of q and of k."""

from __future__ import annotations

from quire.families.family import Family
from quire.families.fields import Fields
from quire.families.rope import rope_from_config
from quire.families.shape import activation, assemble, attention, head_dim_of
from quire.families.weights import LLAMA_NAMES, WeightMap, build_map
from quire.modelspec import LayerSpec, MlpSpec, ModelSpec

_NAMES = {
    **LLAMA_NAMES,
    "attn_post_norm.weight": "post_attention_layernorm.weight",
    "mlp_post_norm.weight": "post_feedforward_layernorm.weight",
}


def read(f: Fields) -> ModelSpec:
    bias = f.flag("attention_bias", False)
    rope = rope_from_config(f, head_dim_of(f))
    layer = LayerSpec(
        attention(f, rope=rope, qkv_bias=bias, o_bias=bias, qk_norm="full"),
        MlpSpec(f.integer("intermediate_size"), activation(f)),
        norms="post",
    )
    return assemble(f, "olmo2", [layer] * f.integer("num_hidden_layers"))


def weights(spec: ModelSpec) -> WeightMap:
    return build_map(spec, _NAMES)


FAMILY = Family("olmo2", "Olmo2ForCausalLM", read, weights)
