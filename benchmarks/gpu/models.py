"""Architectures of the end-to-end parts, with random weights made on the device; "tiny" is for the interpreter."""

from __future__ import annotations

from dataclasses import replace

from quire.config import EngineConfig
from quire.device import detect_device
from quire.modelspec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec
from quire.resolve import resolve
from quire.rope_spec import RopeSpec

from quire.args import EngineArgs  # isort: skip

LONGEST = 8192  # positions: what the parts need


def dense(layers: int, hidden: int, heads: int, kv_heads: int, dim: int, inter: int, vocab: int) -> ModelSpec:
    rope = RopeSpec(500000.0, dim)
    layer = LayerSpec(AttentionSpec(heads, kv_heads, dim, dim, dim**-0.5, rope), MlpSpec(inter))
    return ModelSpec("llama", "LlamaForCausalLM", vocab, hidden, (layer,) * layers, 1e-5, LONGEST)


def qwen(layers: int, hidden: int, heads: int, kv_heads: int, mlp: MlpSpec, *, tied: bool) -> ModelSpec:
    attention = AttentionSpec(heads, kv_heads, 128, 128, 128**-0.5, RopeSpec(1e6, 128), qk_norm="head")
    return ModelSpec(
        "qwen3", "Qwen3ForCausalLM", 151936, hidden, (LayerSpec(attention, mlp),) * layers, 1e-6, LONGEST,
        tie_word_embeddings=tied,
    )  # fmt: skip


SPECS = {
    "llama-8b": dense(32, 4096, 32, 8, 128, 14336, 128256),
    "qwen3-0.6b": qwen(28, 1024, 16, 8, MlpSpec(3072), tied=True),
    "qwen3-30b-a3b": qwen(48, 2048, 32, 4, MlpSpec(768, moe=MoeSpec(128, 8, 768)), tied=False),
    "tiny": replace(dense(1, 32, 4, 2, 16, 48, 131), max_position_embeddings=256),
}


def configuration(model: str, **settings: object) -> EngineConfig:
    """The engine's configuration for random weights of ``model``, on the GPU or in the interpreter."""
    device = detect_device("interpret" if model == "tiny" else "cuda")
    args = EngineArgs(model=model, load_format="random", dtype="bfloat16", **settings)  # type: ignore[arg-type]
    return resolve(args, SPECS[model], device, path=model)
