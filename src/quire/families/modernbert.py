"""ModernBERT (Warner et al. 2024): norms before each block, gated MLPs, rotary positions, windows in most layers."""

from __future__ import annotations

from dataclasses import replace

from quire.encoder_spec import EncoderLayer
from quire.families.bert import encoder_model, encoder_of, with_labels
from quire.families.encoder_names import EncoderNames, encoder_map, qkv_in
from quire.families.rope import rope_from_config
from quire.families.shape import Fields, head_dim_of, layer_types
from quire.families.weights import Family, WeightMap
from quire.modelspec import ModelSpec

_NAMES = EncoderNames(
    "layers.{}.",
    {"attn.o": "attn.Wo", "mlp.down": "mlp.Wo", "attn_norm": "attn_norm", "mlp_norm": "mlp_norm"},
    {"embed": "embeddings.tok_embeddings", "embed_norm": "embeddings.norm", "final_norm": "final_norm"},
    ("", "model."),
    {"head.dense": "head.dense", "head.norm": "head.norm", "head.out": "classifier"},
    # The first half is activated, the second multiplies it.
    {**qkv_in("attn.Wqkv"), "mlp.Wi": ("mlp.gate", "mlp.up")},
)


def read_modernbert(f: Fields) -> ModelSpec:
    """Return the spec of a ModernBERT."""
    count, every = f.integer("num_hidden_layers"), f.integer("global_attn_every_n_layers", 3)
    kinds = layer_types(
        f, ["sliding_attention" if index % every else "full_attention" for index in range(count)]
    )
    size = head_dim_of(f)
    # The older keys have a base per type of layer, and know no other kind.
    full = rope_from_config(
        f, size, default_theta=160_000.0, layer_type="full_attention", theta_key="global_rope_theta"
    )
    local = rope_from_config(
        f, size, default_theta=10_000.0, layer_type="sliding_attention", theta_key="local_rope_theta"
    )
    window = f.integer("local_attention", 128) // 2
    layers = [
        EncoderLayer(None, full, has_attn_norm=index > 0)
        if kind == "full_attention"
        else EncoderLayer(window, local, has_attn_norm=index > 0)
        for index, kind in enumerate(kinds)
    ]
    f = Fields(
        {
            **f.values,
            "hidden_act": f.text("hidden_activation", "gelu"),
            "layer_norm_eps": f.number("norm_eps", 1e-5),
        },
        f.where,
    )
    encoder = encoder_of(
        f, gated=True, norms="pre", norm_bias=f.flag("norm_bias", False), attn_bias=f.flag("attention_bias", False),
        mlp_bias=f.flag("mlp_bias", False),
    )  # fmt: skip
    encoder = replace(encoder, layers=tuple(layers))
    return encoder_model(f, "modernbert", encoder, f.integer("max_position_embeddings", 8192))


def read_modernbert_classifier(f: Fields) -> ModelSpec:
    """Return the spec of a ModernBERT that classifies, such as GTE's reranker."""
    f.refuse("classifier_pooling", unless=("cls", "mean"), why="a classifier reads the first row or the mean")
    f.refuse("classifier_activation", unless=("gelu",), why="its head has this activation")
    return with_labels(
        f, read_modernbert(f), "modernbert_classifier", rows=f.text("classifier_pooling", "cls"), activation="gelu",
        dense_bias=f.flag("classifier_bias", False), norm=True,
    )  # fmt: skip


def modernbert_map(spec: ModelSpec) -> WeightMap:
    """Map the weights of a ModernBERT, bare or with a head."""
    return encoder_map(spec, [_NAMES])


MODERNBERT = Family("modernbert", read_modernbert, modernbert_map)
MODERNBERT_CLASSIFIER = Family("modernbert_classifier", read_modernbert_classifier, modernbert_map)
