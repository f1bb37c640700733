"""Apertus (Swiss AI 2025, arXiv:2509.14233): Llama with norms on q and k, and MLPs with xIELU and without a gate."""

from __future__ import annotations

from dataclasses import replace

from quire.families.rope import rope_from_config
from quire.families.shape import Fields, assemble, attention, biases, head_dim_of
from quire.families.weights import LLAMA_NAMES, Family, WeightMap, build_map
from quire.modelspec import LayerSpec, MlpSpec, ModelSpec

_NAMES = {
    **LLAMA_NAMES,
    "attn_norm.weight": "attention_layernorm.weight",
    "mlp_norm.weight": "feedforward_layernorm.weight",
    **{f"mlp.alpha_{sign}": f"mlp.act_fn.alpha_{sign}" for sign in "pn"},
}
# Constants of the activation, which are stored as buffers.
_CONSTANTS = (r"model\.layers\.\d+\.mlp\.act_fn\.(beta|eps)",)
_KEYS = ((r"mlp\.act_fn\.\w+", ("hidden_act",)),)
_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def read_apertus(f: Fields) -> ModelSpec:
    if f.text("hidden_act", "xielu") != "xielu":
        raise f.wrong("hidden_act", "'xielu', which the MLPs of this family have")
    if f.nested("rope_parameters") is None and f.nested("rope_scaling") is None:
        theta = f.number("rope_theta", _ROPE["rope_theta"])  # type: ignore[arg-type]
        f = Fields({**f.values, "rope_parameters": {**_ROPE, "rope_theta": theta}}, f.where)
    rope = rope_from_config(f, head_dim_of(f), default_theta=12_000_000.0)
    mlp = MlpSpec(f.integer("intermediate_size", 14_336), "xielu")
    attn = attention(f, rope=rope, qk_norm="head", **biases(f))
    return assemble(f, "apertus", LayerSpec(attn, mlp), eps=1e-5)


def weights(spec: ModelSpec) -> WeightMap:
    return replace(build_map(spec, _NAMES, ignore=_CONSTANTS), keys=_KEYS)


APERTUS = Family("apertus", read_apertus, weights)
