"""SmolLM3: Llama in which every fourth layer has no position embedding (NoPE, arXiv:2501.18795)."""

from __future__ import annotations

from quire.families.family import Family
from quire.families.fields import Fields
from quire.families.rope import rope_from_config
from quire.families.shape import activation, assemble, attention, head_dim_of, layer_types, window_of
from quire.families.weights import build_map
from quire.modelspec import LayerSpec, MlpSpec, ModelSpec


def read(f: Fields) -> ModelSpec:
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


FAMILY = Family("smollm3", "SmolLM3ForCausalLM", read, build_map)
