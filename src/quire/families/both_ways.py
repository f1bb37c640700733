"""Encoders made of a decoder's layers, whose rows see each other both ways: EmbeddingGemma and EuroBERT."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.encoder_spec import EncoderLayer, EncoderSpec
from quire.families.encoder_names import encoder_map, llama_like
from quire.families.gemma import read_gemma3
from quire.families.llama import read_llama
from quire.families.shape import Fields
from quire.families.weights import Family, WeightMap
from quire.modelspec import ModelSpec

_PREFIXES = ("", "model.")
_TOP = {"embed": "embed_tokens", "final_norm": "norm"}
_NORMS = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_SANDWICH = {
    "attn_norm": "input_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def read_embedding_gemma(f: Fields) -> ModelSpec:
    """Return the spec of an EmbeddingGemma, a Gemma 3 whose windows reach half as far to both sides."""
    return _both_ways(read_gemma3(f), "embedding_gemma", norms="sandwich", norm="rms_plus_one")


def read_eurobert(f: Fields) -> ModelSpec:
    """Return the spec of a EuroBERT (arXiv:2503.05500)."""
    return _both_ways(read_llama(f), "eurobert", norms="pre", norm="rms")


def _both_ways(decoder: ModelSpec, family: str, **more: Any) -> ModelSpec:
    """Return ``decoder`` as an encoder without its output matrix."""
    layer = decoder.layers[0]
    attn, mlp = layer.attention, layer.mlp
    assert mlp.activation in ("silu", "gelu", "gelu_tanh"), mlp.activation
    encoder = EncoderSpec(
        tuple(
            EncoderLayer(None if attention.window is None else attention.window // 2, attention.rope)
            for attention in decoder.attentions
        ),
        attn.num_heads, attn.head_dim, mlp.intermediate_size, activation=mlp.activation, gated=True, norm_bias=False,
        embed_norm=False, num_kv_heads=attn.num_kv_heads, qk_norm=attn.qk_norm == "head", scale=attn.scale,
        attn_bias=attn.qkv_bias, mlp_bias=mlp.bias, embedding_scale=decoder.embedding_scale, **more,
    )  # fmt: skip
    return replace(
        decoder,
        family=family,
        layers=(),
        encoder=encoder,
        tie_word_embeddings=False,
        norm_plus_one=False,
        embedding_scale=1.0,
    )


def gemma_map(spec: ModelSpec) -> WeightMap:
    """Map the weights of an EmbeddingGemma."""
    return encoder_map(spec, [llama_like(_PREFIXES, _SANDWICH, **_TOP)])


def eurobert_map(spec: ModelSpec) -> WeightMap:
    """Map the weights of a EuroBERT."""
    return encoder_map(spec, [llama_like(_PREFIXES, _NORMS, **_TOP)])


EMBEDDING_GEMMA = Family("embedding_gemma", read_embedding_gemma, gemma_map)
EUROBERT = Family("eurobert", read_eurobert, eurobert_map)
