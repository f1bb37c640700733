"""Gemma 2 (arXiv:2408.00118) and Gemma 3 text (arXiv:2503.19786): norms around both blocks, windows, soft caps."""

from __future__ import annotations

from quire.families.rope import rope_from_config, scaled_rope, scaling_fields
from quire.families.shape import Fields, activation, assemble, attention, biases, layer_types, window_of
from quire.families.weights import LLAMA_NAMES, SANDWICH_NORMS, Family, WeightMap, build_map
from quire.modelspec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec


def read_gemma2(f: Fields) -> ModelSpec:
    count = f.integer("num_hidden_layers")
    rope = rope_from_config(f, f.integer("head_dim", 256))
    kinds = layer_types(f, ["full_attention" if i % 2 else "sliding_attention" for i in range(count)])
    cap = f.optional_number("attn_logit_softcapping")
    return _assemble(f, "gemma2", [_attention(f, rope, kind, soft_cap=cap) for kind in kinds])


def read_gemma3(f: Fields) -> ModelSpec:
    """Every sixth layer is global with its own base frequency; the others slide with the local one."""
    count = f.integer("num_hidden_layers")
    pattern = f.integer("sliding_window_pattern", f.integer("_sliding_window_pattern", 6))
    kinds = layer_types(
        f, ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(count)]
    )
    head_dim = f.integer("head_dim", 256)
    if f.has("rope_parameters"):
        full = rope_from_config(f, head_dim, default_theta=1e6, layer_type="full_attention")
        local = rope_from_config(f, head_dim, layer_type="sliding_attention")
    else:  # rope_scaling applies to the global layers only
        full = scaled_rope(f, scaling_fields(f), RopeSpec(f.number("rope_theta", 1e6), head_dim))
        local = RopeSpec(f.number("rope_local_base_freq", 1e4), head_dim)
    ropes = {"full_attention": full, "sliding_attention": local}
    cap = f.optional_number("attn_logit_softcapping")
    layers = [_attention(f, ropes[kind], kind, soft_cap=cap, qk_norm=True) for kind in kinds]
    return _assemble(f, "gemma3", layers)


def _attention(
    f: Fields, rope: RopeSpec, kind: str, *, soft_cap: float | None, qk_norm: bool = False
) -> AttentionSpec:
    scale = f.number("query_pre_attn_scalar", 256.0) ** -0.5
    return attention(
        f, rope=rope, window=window_of(f, kind), scale=scale, soft_cap=soft_cap, head_dim=f.integer("head_dim", 256),
        qk_norm="head" if qk_norm else "none", **biases(f),
    )  # fmt: skip


def _assemble(f: Fields, family: str, attentions: list[AttentionSpec]) -> ModelSpec:
    f.refuse("use_bidirectional_attention", unless=(False,), why="decoders attend to the past only")
    # Early Gemma files say hidden_act = "gelu" but mean the tanh form, which the newer key names.
    mlp = MlpSpec(f.integer("intermediate_size"), activation(f, "hidden_activation", "gelu_pytorch_tanh"))
    layers = [LayerSpec(item, mlp, "sandwich") for item in attentions]
    return assemble(
        f, family, layers, tied=True, norm_plus_one=True,
        embedding_scale=f.integer("hidden_size") ** 0.5,
        logits_soft_cap=f.optional_number("final_logit_softcapping"),
    )  # fmt: skip


def weights(spec: ModelSpec) -> WeightMap:
    return build_map(spec, {**LLAMA_NAMES, **SANDWICH_NORMS})


GEMMA2 = Family("gemma2", "Gemma2ForCausalLM", read_gemma2, weights)
GEMMA3 = Family("gemma3", "Gemma3ForCausalLM", read_gemma3, weights)
