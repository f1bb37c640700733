"""OLMo 2 and 3, EXAONE 4: norms after the blocks, RMSNorm on q and k."""

from __future__ import annotations

from quire.families.rope import rope_from_config
from quire.families.shape import (
    Fields,
    assemble,
    attention,
    biases,
    dense,
    head_dim_of,
    layer_types,
    uniform_window,
    window_of,
)
from quire.families.weights import LLAMA_NAMES, Family, WeightMap, build_map
from quire.modelspec import LayerSpec, ModelSpec

_NAMES = {
    **LLAMA_NAMES,
    "attn_post_norm.weight": "post_attention_layernorm.weight",
    "mlp_post_norm.weight": "post_feedforward_layernorm.weight",
}


def read_olmo2(f: Fields) -> ModelSpec:
    """OLMo 2 (arXiv:2501.00656): norms after the blocks, RMSNorm over the whole projection of q and of k."""
    attn = attention(f, rope=rope_from_config(f, head_dim_of(f)), qk_norm="full", **biases(f))
    return assemble(f, "olmo2", LayerSpec(attn, dense(f), norms="post"), eps=1e-5)


def read_olmo3(f: Fields) -> ModelSpec:
    """OLMo 3 (arXiv:2512.13961): OLMo 2 in which three of four layers slide; only the others stretch their RoPE."""
    count = f.integer("num_hidden_layers")
    kinds = layer_types(f, ["full_attention" if i % 4 == 3 else "sliding_attention" for i in range(count)])
    head_dim = head_dim_of(f)
    plain = Fields({**f.values, "rope_scaling": None}, f.where)
    ropes = {
        kind: rope_from_config(fields, head_dim, default_theta=5e5, layer_type=kind)
        for kind, fields in (("full_attention", f), ("sliding_attention", plain))
    }
    own = ropes["sliding_attention"].theta
    f.refuse("rope_local_base_freq", unless=(own,), why="rope_theta or rope_parameters says it here")
    mlp, more = dense(f), biases(f)
    attentions = [
        attention(f, rope=ropes[kind], window=window_of(f, kind, 4096), qk_norm="full", **more)
        for kind in kinds
    ]
    return assemble(
        f, "olmo3", [LayerSpec(attention, mlp, norms="post") for attention in attentions], eps=1e-5
    )


def read_exaone4(f: Fields) -> ModelSpec:
    """EXAONE 4 (arXiv:2507.11407): norms after the blocks, RMSNorm on each head; where some slide, only they rotate."""
    count = f.integer("num_hidden_layers")
    window = uniform_window(f, 4096)
    slides = window is not None
    default = ["full_attention"] * count
    if slides and not f.has("layer_types"):  # a file with layer_types may write its pattern as "LLLG"
        every = f.integer("sliding_window_pattern", 4)
        default = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(count)]
    kinds = layer_types(f, default)
    rope, mlp = rope_from_config(f, head_dim_of(f)), dense(f)
    layers = []
    for kind in kinds:
        rotates = not slides or kind == "sliding_attention"
        attn = attention(f, rope=rope if rotates else None, window=window_of(f, kind, window), qk_norm="head")
        layers.append(LayerSpec(attn, mlp, norms="post"))
    return assemble(f, "exaone4", layers, eps=1e-5)


def weights(spec: ModelSpec) -> WeightMap:
    return build_map(spec, _NAMES)


OLMO2 = Family("olmo2", read_olmo2, weights)
OLMO3 = Family("olmo3", read_olmo3, weights)
EXAONE4 = Family("exaone4", read_exaone4, weights)
