"""Qwen2 / Qwen2.5 (biases on q, k and v) and Qwen3 (RMSNorm on each head of q and k), dense and with experts."""

from __future__ import annotations

from typing import Any

from quire.families.rope import rope_from_config
from quire.families.shape import (
    Fields,
    activation,
    assemble,
    attention,
    biases,
    dense,
    head_dim_of,
    layer_types,
    window_of,
)
from quire.families.weights import LLAMA_NAMES, Family, WeightMap, build_map, expert_rules
from quire.modelspec import LayerSpec, MlpSpec, ModelSpec, MoeSpec

_MOE_NAMES = {
    **LLAMA_NAMES,
    "moe.shared_gate.weight": "mlp.shared_expert_gate.weight",
    **{f"moe.shared.{n}.weight": f"mlp.shared_expert.{n}_proj.weight" for n in ("gate", "up", "down")},
}


def layer_kinds(f: Fields) -> tuple[str, ...]:
    """Return ``layer_types``; older files: layers from ``max_window_layers`` on slide if ``use_sliding_window``."""
    count = f.integer("num_hidden_layers")
    sliding = f.flag("use_sliding_window", False) and f.has("sliding_window")
    first = f.integer("max_window_layers", 28, minimum=0) if sliding else count
    return layer_types(f, ["full_attention" if i < first else "sliding_attention" for i in range(count)])


def read_qwen2(f: Fields) -> ModelSpec:
    rope, mlp = rope_from_config(f, head_dim_of(f)), dense(f)
    attentions = [
        attention(f, rope=rope, window=window_of(f, kind), qkv_bias=True) for kind in layer_kinds(f)
    ]
    return assemble(f, "qwen2", [LayerSpec(attention, mlp) for attention in attentions])


def read_qwen3(f: Fields) -> ModelSpec:
    head_dim, mlp = f.integer("head_dim", 128), dense(f)
    shared: dict[str, Any] = {"rope": rope_from_config(f, head_dim), "qk_norm": "head", "head_dim": head_dim}
    shared |= biases(f)
    attentions = [attention(f, window=window_of(f, kind), **shared) for kind in layer_kinds(f)]
    return assemble(f, "qwen3", [LayerSpec(attention, mlp) for attention in attentions])


def read_qwen2_moe(f: Fields) -> ModelSpec:
    """Qwen1.5-MoE, Qwen2-57B-A14B: a gated shared expert."""
    shared = f.integer("shared_expert_intermediate_size")
    return _read_moe(f, "qwen2_moe", shared, qkv_bias=f.flag("qkv_bias", True))


def read_qwen3_moe(f: Fields) -> ModelSpec:
    """Qwen3-30B-A3B, -235B-A22B."""
    return _read_moe(f, "qwen3_moe", 0, qk_norm="head", **biases(f))


def _read_moe(f: Fields, family: str, shared: int, **of_attention: Any) -> ModelSpec:
    """``shared``: the intermediate size of the shared expert; 0: there is none."""
    f.refuse("use_sliding_window", unless=(False,), why="no published checkpoint of this family slides")
    if "sliding_attention" in layer_types(f, ["full_attention"] * f.integer("num_hidden_layers")):
        raise f.wrong(
            "layer_types", "'full_attention' for each layer: no published checkpoint of this family slides"
        )
    moe = MoeSpec(
        num_experts=f.integer("num_local_experts" if "num_local_experts" in f.values else "num_experts"),
        top_k=f.integer("num_experts_per_tok"),
        intermediate_size=f.integer("moe_intermediate_size"),
        normalize_topk=f.flag("norm_topk_prob", False),
        shared_intermediate_size=shared,
        shared_gate=shared > 0,
    )
    if moe.top_k > moe.num_experts:
        raise f.wrong("num_experts_per_tok", f"at most the {moe.num_experts} experts")
    step = f.integer("decoder_sparse_step", 1)
    dense_layers = set(f.integers("mlp_only_layers"))
    attn = attention(f, rope=rope_from_config(f, head_dim_of(f)), **of_attention)
    sparse = LayerSpec(attn, MlpSpec(moe.intermediate_size, activation(f), moe=moe))
    layers = [
        LayerSpec(attn, dense(f)) if index in dense_layers or (index + 1) % step else sparse
        for index in range(f.integer("num_hidden_layers"))
    ]
    return assemble(f, family, layers)


def moe_weights(spec: ModelSpec) -> WeightMap:
    return build_map(spec, _MOE_NAMES, expert_rules)


QWEN2 = Family("qwen2", read_qwen2, build_map)
QWEN3 = Family("qwen3", read_qwen3, build_map)
QWEN2_MOE = Family("qwen2_moe", read_qwen2_moe, moe_weights)
QWEN3_MOE = Family("qwen3_moe", read_qwen3_moe, moe_weights)
