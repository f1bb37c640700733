"""Phi-3, Phi-3.5 mini and Phi-4 (arXiv:2404.14219): Llama with fused projections and, for long contexts, LongRoPE."""

from __future__ import annotations

from quire.families.family import Family
from quire.families.fields import Fields
from quire.families.rope import rope_from_config
from quire.families.shape import activation, assemble, attention, head_dim_of, uniform_window
from quire.families.weights import LLAMA_NAMES, Take, WeightMap, build_map
from quire.modelspec import LayerSpec, MlpSpec, ModelSpec


def read(f: Fields) -> ModelSpec:
    f = _longrope_by_its_old_name(f)
    layer = LayerSpec(
        attention(f, rope=rope_from_config(f, head_dim_of(f)), window=uniform_window(f)),
        MlpSpec(f.integer("intermediate_size"), activation(f)),
    )
    return assemble(f, "phi3", [layer] * f.integer("num_hidden_layers"))


def _longrope_by_its_old_name(f: Fields) -> Fields:
    """The first releases wrote "yarn" or "su" into the type and the factors of LongRoPE beside it."""
    values = dict(f.values)
    for key in ("rope_scaling", "rope_parameters"):
        scaling = f.nested(key)
        if scaling is not None and scaling.has("long_factor"):
            values[key] = {**scaling.values, "rope_type": "longrope"}
    return Fields(values, f.where)


def fused_takes(spec: ModelSpec, index: int, qkv_name: str, gate_up_name: str) -> dict[str, tuple[Take, ...]]:
    """Takes out of fused projections: the rows of one are q, k, v, those of the other gate, up."""
    layer, hidden = spec.layers[index], spec.hidden_size
    a, inter = layer.attention, layer.mlp.intermediate_size
    q_rows, kv_rows = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    qkv, gate_up = (qkv_name,), (gate_up_name,)
    shape = (q_rows + 2 * kv_rows, hidden)
    return {
        "attn.q.weight": (Take(qkv, shape, stop=q_rows),),
        "attn.k.weight": (Take(qkv, shape, start=q_rows, stop=q_rows + kv_rows),),
        "attn.v.weight": (Take(qkv, shape, start=q_rows + kv_rows, stop=shape[0]),),
        "mlp.gate.weight": (Take(gate_up, (2 * inter, hidden), stop=inter),),
        "mlp.up.weight": (Take(gate_up, (2 * inter, hidden), start=inter, stop=2 * inter),),
    }


def _rules(spec: ModelSpec, index: int, prefix: str) -> dict[str, tuple[Take, ...]]:
    return fused_takes(spec, index, f"{prefix}self_attn.qkv_proj.weight", f"{prefix}mlp.gate_up_proj.weight")


def weights(spec: ModelSpec) -> WeightMap:
    return build_map(spec, LLAMA_NAMES, _rules)


FAMILY = Family("phi3", "Phi3ForCausalLM", read, weights)
