"""Qwen2 / Qwen2.5 (biases on q, k and v) and Qwen3 (RMSNorm on each head of q and k); dense models."""

from __future__ import annotations

from quire.families.family import Family
from quire.families.fields import Fields
from quire.families.rope import rope_from_config
from quire.families.shape import activation, assemble, attention, layer_types, window_of
from quire.families.shape import head_dim_of as plain_head_dim
from quire.families.weights import build_map
from quire.modelspec import LayerSpec, MlpSpec, ModelSpec


def layer_kinds(f: Fields) -> tuple[str, ...]:
    """``layer_types``; before them, layers from ``max_window_layers`` on slid where ``use_sliding_window``."""
    count = f.integer("num_hidden_layers")
    sliding = f.flag("use_sliding_window", False) and f.has("sliding_window")
    first = f.integer("max_window_layers", 28, minimum=0) if sliding else count
    return layer_types(f, ["full_attention" if i < first else "sliding_attention" for i in range(count)])


def read_qwen2(f: Fields) -> ModelSpec:
    rope = rope_from_config(f, plain_head_dim(f))
    mlp = MlpSpec(f.integer("intermediate_size"), activation(f))
    layers = [
        LayerSpec(attention(f, rope=rope, window=window_of(f, kind), qkv_bias=True), mlp)
        for kind in layer_kinds(f)
    ]
    return assemble(f, "qwen2", layers)


def read_qwen3(f: Fields) -> ModelSpec:
    head_dim = f.integer("head_dim", 128)
    rope = rope_from_config(f, head_dim)
    mlp = MlpSpec(f.integer("intermediate_size"), activation(f))
    bias = f.flag("attention_bias", False)
    layers = [
        LayerSpec(
            attention(
                f,
                rope=rope,
                window=window_of(f, kind),
                qkv_bias=bias,
                o_bias=bias,
                qk_norm="head",
                head_dim=head_dim,
            ),
            mlp,
        )
        for kind in layer_kinds(f)
    ]
    return assemble(f, "qwen3", layers)


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", read_qwen2, build_map)
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", read_qwen3, build_map)
