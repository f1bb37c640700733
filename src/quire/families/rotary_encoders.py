"""Encoders of BERT's layers with rotary positions: Jina v3, NomicBERT (arXiv:2402.01613) and GTE (arXiv:2407.19669).

Files on the hub that were written for code of their own have other keys and names than those of transformers; both are
read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.encoder_spec import EncoderLayer
from quire.families.bert import encoder_model, encoder_of, with_labels
from quire.families.encoder_names import EncoderNames, encoder_map, llama_like, qkv_in
from quire.families.rope import kind_of, rope_from_config, scaling_fields
from quire.families.shape import Fields, head_dim_of
from quire.families.weights import Family, WeightMap
from quire.modelspec import ModelSpec
from quire.rope_spec import RopeSpec

_NORMS = {"attn_norm": "post_attention_layernorm", "mlp_norm": "post_mlp_layernorm"}
_EMBEDDINGS = {
    "embed": "embeddings.word_embeddings",
    "types": "embeddings.token_type_embeddings",
    "embed_norm": "embeddings.LayerNorm",
}
_HEAD = {"head.dense": "pooler.dense", "head.out": "classifier"}
# Keys of NomicBERT's first files, which are those of GPT-2.
_NOMIC_KEYS = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "rope_theta": "rotary_emb_base",
    "layer_norm_eps": "layer_norm_epsilon",
}
_NOMIC_ONLY: Mapping[str, object] = {
    "prenorm": False, "qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False, "use_rms_norm": False,
    "parallel_block": False, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "causal": False,
    "num_experts": 0, "moe_every_n_layers": 0,
}  # fmt: skip


def read_jina_v3(f: Fields) -> ModelSpec:
    """Return the spec of a Jina v3 without its adapters."""
    return _rotary(f, "jina_embeddings_v3", 20_000.0)


def read_nomic_bert(f: Fields) -> ModelSpec:
    """Return the spec of a NomicBERT."""
    if f.has("n_embd"):
        f = _of_gpt2_keys(f)
    f.refuse("hidden_act", unless=("silu", "gelu"), why="its gates are swiglu or geglu")
    return _rotary(f, "nomic_bert", 1000.0, gated=True, attn_bias=False, mlp_bias=False)


def _of_gpt2_keys(f: Fields) -> Fields:
    """Return the fields of NomicBERT's first files under the names of transformers."""
    for key, value in _NOMIC_ONLY.items():
        f.refuse(key, unless=(value,), why="NomicBERT's layers have one form")
    f.refuse("rotary_scaling_factor", unless=(), why="frequencies that follow the length are not computed")
    f.refuse("activation_function", unless=("swiglu", "geglu"), why="its MLP has a gate")
    kind = {"swiglu": "silu", "geglu": "gelu"}[f.text("activation_function", "swiglu")]
    named = {new: f.values[old] for new, old in _NOMIC_KEYS.items() if f.has(old)}
    return Fields({**f.values, **named, "hidden_act": kind}, f.where)


def read_gte(f: Fields) -> ModelSpec:
    """Return the spec of a GTE."""
    return _rotary(f, "gte", 160_000.0, gated=True, mlp_bias="down")


def read_gte_classifier(f: Fields) -> ModelSpec:
    """Return the spec of a GTE that classifies by its first row, such as GTE's rerankers."""
    return with_labels(f, read_gte(f), "gte_classifier")


def read_new(f: Fields) -> ModelSpec:
    """Return the spec of a GTE with the configuration of its first files, whose model type is "new"."""
    for key, value in (
        ("layer_norm_type", "layer_norm"),
        ("position_embedding_type", "rope"),
        ("pack_qkv", True),
        ("logn_attention_scale", False),
        ("logn_attention_clip1", False),
    ):
        f.refuse(key, unless=(value,), why="GTE's layers have one form")
    scaling = scaling_fields(f)
    if kind_of(scaling) != "ntk":
        return replace(read_gte(f), family="new")
    scaling.refuse("mixed_b", unless=(), why="its frequencies have one factor")
    plain = Fields({**f.values, "rope_scaling": None, "rope_parameters": None}, f.where)
    rope, factor = rope_from_config(plain, head_dim_of(f), default_theta=10_000.0), scaling.number("factor")
    # Its code stretches the base, and divides each frequency by the rest of the factor.
    rope = replace(rope, theta=rope.theta * factor, kind="linear", factor=factor ** (2 / rope.dim))
    return replace(_rotary(f, "gte", 0.0, rope, gated=True, mlp_bias="down"), family="new")


def read_new_classifier(f: Fields) -> ModelSpec:
    """Return the spec of a GTE that classifies, with the configuration of its first files."""
    return with_labels(f, read_new(f), "new_classifier")


def _rotary(f: Fields, family: str, theta: float, rope: RopeSpec | None = None, **more: Any) -> ModelSpec:
    """Return BERT's layers with rotary positions instead of a table."""
    rope = rope or rope_from_config(f, head_dim_of(f), default_theta=theta)
    num_types = f.integer("type_vocab_size", 2 if family == "nomic_bert" else 1, minimum=0)
    encoder = encoder_of(f, num_token_types=num_types, pair_types=num_types > 1, **more)
    encoder = replace(encoder, layers=(EncoderLayer(rope=rope),) * len(encoder.layers))
    return encoder_model(f, family, encoder, f.integer("max_position_embeddings"))


def jina_map(spec: ModelSpec) -> WeightMap:
    """Map the weights of a Jina v3."""
    prefixes = ("", "roberta.", "jina_embeddings_v3.")
    native = llama_like(prefixes, {**_NORMS, "mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"}, **_EMBEDDINGS)
    parts = {"attn.o": "mixer.out_proj", "attn_norm": "norm1", "mlp_norm": "norm2"}
    parts |= {"mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"}
    first = EncoderNames(
        "encoder.layers.{}.", parts, {**_EMBEDDINGS, "embed_norm": "emb_ln"}, prefixes, fused=qkv_in("mixer.Wqkv"),
    )  # fmt: skip
    return encoder_map(spec, [native, first])


def nomic_map(spec: ModelSpec) -> WeightMap:
    """Map the weights of a NomicBERT."""
    prefixes = ("", "nomic_bert.", "bert.")
    native = llama_like(prefixes, _NORMS, **_EMBEDDINGS)
    parts = {"attn.o": "attn.out_proj", "attn_norm": "norm1", "mlp_norm": "norm2"}
    parts |= {"mlp.up": "mlp.fc11", "mlp.gate": "mlp.fc12", "mlp.down": "mlp.fc2"}
    first = EncoderNames(
        "encoder.layers.{}.", parts, {**_EMBEDDINGS, "embed_norm": "emb_ln"}, prefixes, fused=qkv_in("attn.Wqkv"),
    )  # fmt: skip
    return encoder_map(spec, [native, first])


def gte_map(spec: ModelSpec) -> WeightMap:
    """Map the weights of a GTE, bare or with a head."""
    prefixes = ("", "gte.", "new.")
    native = replace(llama_like(prefixes, _NORMS, **_EMBEDDINGS), head=_HEAD)
    parts = {
        "attn.o": "attention.o_proj",
        "attn_norm": "attn_ln",
        "mlp_norm": "mlp_ln",
        "mlp.down": "mlp.down_proj",
    }
    fused = {**qkv_in("attention.qkv_proj"), "mlp.up_gate_proj": ("mlp.up", "mlp.gate")}
    first = EncoderNames("encoder.layer.{}.", parts, _EMBEDDINGS, prefixes, _HEAD, fused)
    return encoder_map(spec, [native, first])


JINA_EMBEDDINGS_V3 = Family("jina_embeddings_v3", read_jina_v3, jina_map)
NOMIC_BERT = Family("nomic_bert", read_nomic_bert, nomic_map)
GTE = Family("gte", read_gte, gte_map)
GTE_CLASSIFIER = Family("gte_classifier", read_gte_classifier, gte_map)
NEW = Family("new", read_new, gte_map)
NEW_CLASSIFIER = Family("new_classifier", read_new_classifier, gte_map)
