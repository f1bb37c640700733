"""Mistral and Mixtral."""

from __future__ import annotations

from quire.families.family import Family
from quire.families.fields import Fields
from quire.families.rope import rope_from_config
from quire.families.shape import activation, assemble, attention, head_dim_of, uniform_window
from quire.families.weights import LLAMA_NAMES, Take, WeightMap, build_map, expert_takes
from quire.modelspec import LayerSpec, MlpSpec, ModelSpec, MoeSpec


def read_mistral(f: Fields) -> ModelSpec:
    """Mistral 7B and its successors (Jiang et al. 2023): Llama with one sliding window for all layers, or none."""
    layer = LayerSpec(
        attention(f, rope=rope_from_config(f, head_dim_of(f)), window=uniform_window(f)),
        MlpSpec(f.integer("intermediate_size"), activation(f)),
    )
    return assemble(f, "mistral", [layer] * f.integer("num_hidden_layers"))


def read_mixtral(f: Fields) -> ModelSpec:
    """Mixtral 8x7B and 8x22B (arXiv:2401.04088): Mistral with two of eight experts a token."""
    moe = MoeSpec(
        num_experts=f.integer("num_local_experts", 8),
        top_k=f.integer("num_experts_per_tok", 2),
        intermediate_size=f.integer("intermediate_size"),
    )
    if moe.top_k > moe.num_experts:
        raise f.wrong("num_experts_per_tok", f"at most num_local_experts = {moe.num_experts}")
    rope = rope_from_config(f, head_dim_of(f), default_theta=1e6)
    layer = LayerSpec(
        attention(f, rope=rope, window=uniform_window(f)),
        MlpSpec(moe.intermediate_size, activation(f), moe=moe),
    )
    return assemble(f, "mixtral", [layer] * f.integer("num_hidden_layers"))


def _mixtral_rules(spec: ModelSpec, index: int, prefix: str) -> dict[str, tuple[Take, ...]]:
    moe = spec.layers[index].mlp.moe
    assert moe is not None
    folder = f"{prefix}block_sparse_moe."
    takes = expert_takes(spec, index, f"{folder}experts.", ("w1", "w3", "w2"), f"{prefix}mlp.experts.")
    shape = (moe.num_experts, spec.hidden_size)
    takes["moe.router.weight"] = (
        Take((f"{folder}gate.weight",), shape),
        Take((f"{prefix}mlp.gate.weight",), shape),
    )
    return takes


def mixtral_weights(spec: ModelSpec) -> WeightMap:
    return build_map(spec, LLAMA_NAMES, _mixtral_rules)


MISTRAL = Family("mistral", "MistralForCausalLM", read_mistral, build_map)
MIXTRAL = Family("mixtral", "MixtralForCausalLM", read_mixtral, mixtral_weights)
