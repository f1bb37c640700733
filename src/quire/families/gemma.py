"""Gemma 2 (arXiv:2408.00118) and Gemma 3 text (arXiv:2503.19786): norms around both blocks, windows, soft caps."""

from __future__ import annotations

from quire.families.rope import rope_from_config
from quire.families.shape import (
    Fields,
    activation,
    assemble,
    attention,
    biases,
    layer_types,
    soft_cap,
    window_of,
)
from quire.families.weights import LLAMA_NAMES, SANDWICH_NORMS, Family, WeightMap, build_map
from quire.modelspec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
from quire.rope_spec import RopeSpec

_GEMMA3 = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}


def read_gemma2(f: Fields) -> ModelSpec:
    count = f.integer("num_hidden_layers")
    rope = rope_from_config(f, f.integer("head_dim", 256))
    kinds = layer_types(f, ["full_attention" if i % 2 else "sliding_attention" for i in range(count)])
    cap = soft_cap(f, "attn_logit_softcapping", 50.0)
    layers = [_attention(f, rope, kind, cap=cap) for kind in kinds]
    return _assemble(f, "gemma2", layers, soft_cap(f, "final_logit_softcapping", 30.0))


def read_gemma3(f: Fields) -> ModelSpec:
    """Every sixth layer is global with its own base frequency; the others slide with the local one.

    What files of the 4B and larger leave out has the default of transformers.
    """
    f = Fields({**f.values, **{key: size for key, size in _GEMMA3.items() if not f.has(key)}}, f.where)
    count = f.integer("num_hidden_layers")
    pattern = f.integer("sliding_window_pattern", f.integer("_sliding_window_pattern", 6))
    kinds = layer_types(
        f, ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(count)]
    )
    head_dim = f.integer("head_dim", 256)
    # rope_scaling and rope_theta are older and apply to the global layers only.
    full = rope_from_config(f, head_dim, default_theta=1e6, layer_type="full_attention")
    local = rope_from_config(
        Fields({**f.values, "rope_scaling": None}, f.where), head_dim, layer_type="sliding_attention",
        theta_key="rope_local_base_freq",
    )  # fmt: skip
    ropes = {"full_attention": full, "sliding_attention": local}
    f.refuse("attn_logit_softcapping", unless=(), why="the attention of Gemma 3 has no soft cap")
    layers = [_attention(f, ropes[kind], kind, qk_norm=True) for kind in kinds]
    return _assemble(f, "gemma3", layers, soft_cap(f, "final_logit_softcapping"))


def _attention(
    f: Fields, rope: RopeSpec, kind: str, *, cap: float | None = None, qk_norm: bool = False
) -> AttentionSpec:
    scale = f.number("query_pre_attn_scalar", 256.0) ** -0.5
    return attention(
        f, rope=rope, window=window_of(f, kind, 4096), scale=scale, soft_cap=cap, head_dim=f.integer("head_dim", 256),
        qk_norm="head" if qk_norm else "none", **biases(f),
    )  # fmt: skip


def _assemble(f: Fields, family: str, attentions: list[AttentionSpec], cap: float | None) -> ModelSpec:
    # Early Gemma files say hidden_act = "gelu" but mean the tanh form, which the newer key names.
    mlp = MlpSpec(f.integer("intermediate_size"), activation(f, "hidden_activation", "gelu_pytorch_tanh"))
    layers = [LayerSpec(item, mlp, "sandwich") for item in attentions]
    return assemble(
        f, family, layers, tied=True, norm_plus_one=True,
        embedding_scale=f.integer("hidden_size") ** 0.5,
        logits_soft_cap=cap,
    )  # fmt: skip


def weights(spec: ModelSpec) -> WeightMap:
    return build_map(spec, {**LLAMA_NAMES, **SANDWICH_NORMS})


GEMMA2 = Family("gemma2", read_gemma2, weights)
GEMMA3 = Family("gemma3", read_gemma3, weights)
