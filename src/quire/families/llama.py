"""Llama 2, 3, 3.1, 3.2, 3.3 (Touvron et al. 2023; Grattafiori et al. 2024) and all that took its architecture."""

from __future__ import annotations

from quire.families.family import Family
from quire.families.fields import Fields
from quire.families.rope import rope_from_config
from quire.families.shape import activation, assemble, attention, head_dim_of
from quire.families.weights import build_map
from quire.modelspec import LayerSpec, MlpSpec, ModelSpec


def read(f: Fields) -> ModelSpec:
    bias = f.flag("attention_bias", False)
    layer = LayerSpec(
        attention(f, rope=rope_from_config(f, head_dim_of(f)), qkv_bias=bias, o_bias=bias),
        MlpSpec(f.integer("intermediate_size"), activation(f), f.flag("mlp_bias", False)),
    )
    return assemble(f, "llama", [layer] * f.integer("num_hidden_layers"))


FAMILY = Family("llama", "LlamaForCausalLM", read, build_map)
