"""Mistral 7B and its successors (Jiang et al. 2023): Llama with one sliding window for all layers, or none."""

from __future__ import annotations

from quire.families.family import Family
from quire.families.fields import Fields
from quire.families.rope import rope_from_config
from quire.families.shape import activation, assemble, attention, head_dim_of, uniform_window
from quire.families.weights import build_map
from quire.modelspec import LayerSpec, MlpSpec, ModelSpec


def read(f: Fields) -> ModelSpec:
    layer = LayerSpec(
        attention(f, rope=rope_from_config(f, head_dim_of(f)), window=uniform_window(f)),
        MlpSpec(f.integer("intermediate_size"), activation(f)),
    )
    return assemble(f, "mistral", [layer] * f.integer("num_hidden_layers"))


FAMILY = Family("mistral", "MistralForCausalLM", read, build_map)
