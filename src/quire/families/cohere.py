"""Command R (2024) and Command R7B, Command A (2025): LayerNorm without a bias, attention and MLP in parallel.

Neighbouring pairs rotate. Of the second generation three in four layers slide, and the others have no positions.
"""

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
    window_of,
)
from quire.families.weights import Family, build_map
from quire.modelspec import LayerSpec, ModelSpec


def read_cohere(f: Fields) -> ModelSpec:
    """Command R and Aya."""
    f.refuse("use_qk_norm", unless=(False,), why="Command R+ has a norm with a mean for each head of q and k")
    rope = rope_from_config(f, head_dim_of(f), default_theta=5e5, interleaved=True)
    return _assemble(
        f, "cohere", [LayerSpec(attention(f, rope=rope, **biases(f)), dense(f), "parallel")] * _count(f)
    )


def read_cohere2(f: Fields) -> ModelSpec:
    """Command R7B, Command A and Aya of 2025."""
    for key, allowed in (
        ("use_qk_norm", False),
        ("use_parallel_block", True),
        ("use_gated_activation", True),
    ):
        f.refuse(key, unless=(allowed,), why="no published model of this family has it otherwise")
    f.refuse("rotary_pct", unless=(1, 1.0), why="this family rotates whole heads")
    every = f.integer("sliding_window_pattern", 4)
    default = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(_count(f))]
    rope, layers = rope_from_config(f, head_dim_of(f), interleaved=True), []
    for kind in layer_types(f, default):
        own = rope if kind == "sliding_attention" else None
        attn = attention(f, rope=own, window=window_of(f, kind, 4096), **biases(f))
        layers.append(LayerSpec(attn, dense(f), "parallel"))
    return _assemble(f, "cohere2", layers)


def _count(f: Fields) -> int:
    return f.integer("num_hidden_layers", 40)


def _assemble(f: Fields, family: str, layers: list[LayerSpec]) -> ModelSpec:
    eps = f.number("layer_norm_eps", 1e-5)
    scale = f.number("logit_scale", 0.0625)
    named = Fields({**f.values, "rms_norm_eps": eps}, f.where)
    if f.has("model_max_length"):  # beside the length of the first stage of training
        longest = f.integer("model_max_length")
        named = Fields({**named.values, "max_position_embeddings": longest}, f.where)
    return assemble(named, family, layers, tied=True, norm_centered=True, logits_scale=scale)


COHERE = Family("cohere", read_cohere, build_map)
COHERE2 = Family("cohere2", read_cohere2, build_map)
