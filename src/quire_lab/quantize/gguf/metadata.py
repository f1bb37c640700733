"""The keys of a GGUF file that say what a model is, as llama.cpp's converter writes them.

What is written is read back by Quire's own reader, and must describe the same model: a choice that GGUF has no key for,
or that llama.cpp makes in its code by architecture, is then found to differ and refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.families.gguf import spec_from_gguf
from quire.layers.rope import inverse_frequencies
from quire.modelspec import ModelSpec
from quire.rope_spec import RopeSpec

# Architecture as in config.json → `general.architecture`.
ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3", "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3MoeForCausalLM": "qwen3moe", "Gemma2ForCausalLM": "gemma2", "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3", "Phi3ForCausalLM": "phi3", "GraniteForCausalLM": "granite",
    "Olmo2ForCausalLM": "olmo2", "SmolLM3ForCausalLM": "smollm3",
}  # fmt: skip
ROPE_FREQS = "rope_freqs.weight"
# What two descriptions of one model may differ in: names, types, and the 1 that files of Gemma have in their norms.
_FREE = ("family", "architecture", "dtype", "norm_plus_one", "bos_token_id", "eos_token_ids")


def architecture(spec: ModelSpec, where: str) -> str:
    """Return `general.architecture`. Raises `UnsupportedModelError` where GGUF is not written."""
    arch = ARCHITECTURES.get(spec.architecture)
    if arch is None:
        raise UnsupportedModelError(
            f"{where}: {spec.architecture} is not written as GGUF; written are {', '.join(ARCHITECTURES)}. Take "
            "--format compressed-tensors."
        )
    return arch


def model_keys(spec: ModelSpec, arch: str, name: str) -> dict[str, Any]:
    """Return the keys that describe ``spec``."""
    attention = spec.attentions[-1]
    dense = next((layer for layer in spec.layers if layer.mlp.moe is None), None)
    own: dict[str, Any] = {
        "context_length": spec.max_position_embeddings,
        "embedding_length": spec.hidden_size,
        "block_count": spec.num_layers,
        "feed_forward_length": spec.layers[0].mlp.intermediate_size if dense is None else dense.mlp.intermediate_size,
        "attention.head_count": attention.num_heads,
        "attention.head_count_kv": attention.num_kv_heads,
        "attention.key_length": attention.head_dim,
        "attention.value_length": attention.v_head_dim,
        "attention.layer_norm_rms_epsilon": float(spec.norm_eps),
        "vocab_size": spec.vocab_size,
    }  # fmt: skip
    own |= _rope(spec) | _windows(spec) | _experts(spec)
    if arch == "granite":
        own |= {
            "attention.scale": attention.scale, "embedding_scale": spec.embedding_scale,
            "residual_scale": spec.residual_scale, "logit_scale": 1.0 / spec.logits_scale,
        }  # fmt: skip
    return {
        "general.architecture": arch, "general.type": "model", "general.name": name,
        "general.quantization_version": 2, **{f"{arch}.{key}": value for key, value in own.items()},
    }  # fmt: skip


def _rope(spec: ModelSpec) -> dict[str, Any]:
    ropes = [attention.rope for attention in spec.attentions if attention.rope is not None]
    if not ropes:
        return {}
    # Of the global layers: the base of Gemma's other layers is fixed in the code of every reader.
    rope = max(ropes, key=lambda rope: rope.theta)
    keys: dict[str, Any] = {"rope.freq_base": float(rope.theta), "rope.dimension_count": rope.dim}
    if rope.kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope.kind, "rope.scaling.factor": float(rope.factor)}
    if rope.kind == "yarn":
        keys["rope.scaling.original_context_length"] = rope.original_max_position
    return keys


def _windows(spec: ModelSpec) -> dict[str, Any]:
    windows = [attention.window for attention in spec.attentions if attention.window is not None]
    keys: dict[str, Any] = {"attention.sliding_window": windows[0]} if windows else {}
    if spec.attentions[-1].soft_cap is not None:
        keys["attn_logit_softcapping"] = float(spec.attentions[-1].soft_cap)
    if spec.logits_soft_cap is not None:
        keys["final_logit_softcapping"] = float(spec.logits_soft_cap)
    return keys


def _experts(spec: ModelSpec) -> dict[str, Any]:
    moe = next((layer.mlp.moe for layer in spec.layers if layer.mlp.moe is not None), None)
    if moe is None:
        return {}
    keys: dict[str, Any] = {
        "expert_count": moe.num_experts, "expert_used_count": moe.top_k,
        "expert_feed_forward_length": moe.intermediate_size,
    }  # fmt: skip
    if moe.shared_intermediate_size:
        keys["expert_shared_feed_forward_length"] = moe.shared_intermediate_size
    return keys


def rope_factors(spec: ModelSpec) -> Tensor | None:
    """Return what each rotary frequency is divided by (Llama 3.1), fp32 ``[dim / 2]``; None for other kinds."""
    rope = next((attention.rope for attention in spec.attentions if attention.rope is not None), None)
    if rope is None or rope.kind != "llama3":
        return None
    plain = inverse_frequencies(replace(rope, kind="default"), spec.max_position_embeddings)
    return plain / inverse_frequencies(rope, spec.max_position_embeddings)


def check_keys(
    spec: ModelSpec, keys: Mapping[str, Any], names: Sequence[str], factors: Tensor | None, where: str
) -> None:
    """Raise `UnsupportedModelError` unless a reader of ``keys`` and of the tensors ``names`` finds ``spec``."""
    floats = {} if factors is None else {ROPE_FREQS: tuple(factors.tolist())}
    try:
        read_back = spec_from_gguf(keys, dict.fromkeys(names), floats.get, where)
    except (ModelLoadError, UnsupportedModelError) as error:
        raise UnsupportedModelError(f"{where} is not written as GGUF: {error}") from None
    for path, ours, theirs in _differences(spec, read_back, ""):
        raise UnsupportedModelError(
            f"{where} is not written as GGUF, which cannot say that {path} is {ours}: a reader of the file would take "
            f"{theirs}. Take --format compressed-tensors."
        )


def _differences(ours: Any, theirs: Any, path: str) -> list[tuple[str, Any, Any]]:
    if isinstance(ours, RopeSpec) and isinstance(theirs, RopeSpec):
        return [] if _same_rope(ours, theirs) else [(path, ours, theirs)]
    if is_dataclass(ours) and type(ours) is type(theirs):
        lines = []
        for field in fields(ours):
            if isinstance(ours, ModelSpec) and field.name in _FREE:
                continue
            lines += _differences(
                getattr(ours, field.name), getattr(theirs, field.name), f"{path}.{field.name}"
            )
        return lines
    if isinstance(ours, tuple) and isinstance(theirs, tuple) and len(ours) == len(theirs):
        return [
            d
            for i, pair in enumerate(zip(ours, theirs, strict=True))
            for d in _differences(*pair, f"{path}[{i}]")
        ]
    if isinstance(ours, float) and isinstance(theirs, (int, float)):
        same = math.isclose(ours, theirs, rel_tol=1e-6)
    else:
        same = ours == theirs
    return [] if same else [(path.lstrip("."), ours, theirs)]


def _same_rope(ours: RopeSpec, theirs: RopeSpec) -> bool:
    if (ours.dim, ours.interleaved) != (theirs.dim, theirs.interleaved):
        return False
    length = 4096
    a, b = inverse_frequencies(ours, length), inverse_frequencies(theirs, length)
    return math.isclose(ours.attention_factor, theirs.attention_factor, rel_tol=1e-5) and torch.allclose(
        a, b, rtol=1e-5
    )
