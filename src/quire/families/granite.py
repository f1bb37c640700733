"""IBM Granite 3 (dense): Llama with multipliers on embedding, attention, residual and logits."""

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


FAMILY = Family("granite", "GraniteForCausalLM", read, build_map)
