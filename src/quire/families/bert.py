"""BERT (Devlin et al. 2018) and DistilBERT: encoders with a table of positions, and a norm after each block.

A checkpoint has the names of the bare model, or those of a model with a head, after "bert.".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from quire.encoder_spec import EncoderLayer, EncoderSpec, HeadSpec
from quire.errors import UnsupportedModelError
from quire.families.encoder_names import EncoderNames, encoder_map
from quire.families.shape import Fields, activation, dtype_of
from quire.families.weights import Family, WeightMap
from quire.modelspec import ModelSpec

LAYER_NAMES: Mapping[str, str] = {
    "attn.q": "attention.self.query",
    "attn.k": "attention.self.key",
    "attn.v": "attention.self.value",
    "attn.o": "attention.output.dense",
    "attn_norm": "attention.output.LayerNorm",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
    "mlp_norm": "output.LayerNorm",
}
TOP_NAMES: Mapping[str, str] = {
    "embed": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings",
    "embed_norm": "embeddings.LayerNorm",
}
_SCORES: Mapping[str, Literal["sigmoid", "identity"]] = {
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.linear.Identity": "identity",
}
BERT_HEAD: Mapping[str, str] = {"head.dense": "pooler.dense", "head.out": "classifier"}
NAMES = EncoderNames("encoder.layer.{}.", LAYER_NAMES, TOP_NAMES, ("", "bert."), BERT_HEAD)
_DISTILBERT_LAYER: Mapping[str, str] = {
    "attn.q": "attention.q_lin",
    "attn.k": "attention.k_lin",
    "attn.v": "attention.v_lin",
    "attn.o": "attention.out_lin",
    "attn_norm": "sa_layer_norm",
    "mlp.up": "ffn.lin1",
    "mlp.down": "ffn.lin2",
    "mlp_norm": "output_layer_norm",
}
_DISTILBERT_HEAD: Mapping[str, str] = {"head.dense": "pre_classifier", "head.out": "classifier"}
_DISTILBERT_SIZES = {
    "hidden_size": "dim",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
}


def read_bert(f: Fields) -> ModelSpec:
    """Return the spec of a BERT."""
    f.refuse("position_embedding_type", unless=("absolute",), why="only positions from a table are computed")
    f.refuse("is_decoder", unless=(False,), why="encoders see both ways")
    f.refuse("add_cross_attention", unless=(False,), why="there is no second sequence to attend to")
    positions = f.integer("max_position_embeddings")
    encoder = encoder_of(f, num_positions=positions, num_token_types=f.integer("type_vocab_size", 2))
    return encoder_model(f, "bert", encoder, positions)


def encoder_of(f: Fields, **more: Any) -> EncoderSpec:
    """Return layers that are all alike, of the sizes that configurations of BERT's kind have."""
    hidden, heads = f.integer("hidden_size"), f.integer("num_attention_heads")
    if hidden % heads:
        raise f.wrong("num_attention_heads", f"a divisor of hidden_size = {hidden}")
    kind = "relu" if f.text("hidden_act", "gelu") == "relu" else activation(f, default="gelu")
    if kind == "swiglu_oai":
        raise UnsupportedModelError(f"{f.where}: hidden_act = {kind!r} is not supported in an encoder.")
    layers = (EncoderLayer(),) * f.integer("num_hidden_layers")
    return EncoderSpec(
        layers, heads, hidden // heads, f.integer("intermediate_size"), activation=kind, **more
    )


def read_bert_classifier(f: Fields) -> ModelSpec:
    """Return the spec of a BERT that classifies by its first row, such as a cross-encoder."""
    return with_labels(f, read_bert(f), "bert_classifier")


def read_distilbert(f: Fields) -> ModelSpec:
    """Return the spec of a DistilBERT (Sanh et al. 2019): BERT's layers without types of tokens."""
    named = {new: f.values[old] for new, old in _DISTILBERT_SIZES.items() if f.has(old)}
    f = Fields({**f.values, **named, "layer_norm_eps": 1e-12}, f.where)
    positions = f.integer("max_position_embeddings", 512)
    return encoder_model(f, "distilbert", encoder_of(f, num_positions=positions), positions)


def read_distilbert_classifier(f: Fields) -> ModelSpec:
    """Return the spec of a DistilBERT that classifies by its first row."""
    return with_labels(f, read_distilbert(f), "distilbert_classifier", activation="relu")


def with_labels(f: Fields, spec: ModelSpec, family: str, **more: Any) -> ModelSpec:
    """Return ``spec`` with a classifier of the labels in ``id2label``, or of ``num_labels``.

    ``more``: further fields of `HeadSpec`.
    """
    assert spec.encoder is not None
    labels = labels_of(f)
    head = HeadSpec(labels, score_of(f, len(labels)), **more)
    return replace(spec, family=family, encoder=replace(spec.encoder, head=head))


def labels_of(f: Fields) -> tuple[str, ...]:
    """Return the names in ``id2label``, or as many as ``num_labels`` says."""
    names = f.nested("id2label")
    count = f.integer("num_labels", 2 if names is None else len(names.values))
    return tuple(f"LABEL_{i}" if names is None else names.text(str(i)) for i in range(count))


def score_of(f: Fields, num_labels: int) -> Literal["sigmoid", "identity", "softmax"]:
    """Return what makes scores of logits: as in the file, else a softmax over labels of which one applies.

    One label, or labels that apply each by itself (``problem_type``): sigmoids, as sentence-transformers does it.
    """
    # The second place is that of files from before its version 4.
    newer = f.nested("sentence_transformers")
    for fields, key in ((newer, "activation_fn"), (f, "sbert_ce_default_activation_function")):
        if fields is not None and fields.has(key):
            fields.refuse(key, unless=tuple(_SCORES), why="scores are sigmoids of logits, or the logits")
            return _SCORES[fields.text(key)]
    several = num_labels > 1 and f.values.get("problem_type") != "multi_label_classification"
    return "softmax" if several else "sigmoid"


def encoder_model(f: Fields, family: str, encoder: EncoderSpec, longest: int) -> ModelSpec:
    """Return the spec of a model of ``encoder`` that takes up to ``longest`` tokens."""
    return ModelSpec(
        family=family,
        architecture=str(f.items("architectures")[0]),
        vocab_size=f.integer("vocab_size"),
        hidden_size=f.integer("hidden_size"),
        layers=(),
        norm_eps=f.number("layer_norm_eps", 1e-12),
        max_position_embeddings=longest,
        dtype="float32" if not (f.has("dtype") or f.has("torch_dtype")) else dtype_of(f),
        encoder=encoder,
    )


def bert_map(spec: ModelSpec) -> WeightMap:
    """Map the weights of a BERT, bare or with a head."""
    return encoder_map(spec, [NAMES])


def distilbert_map(spec: ModelSpec) -> WeightMap:
    """Map the weights of a DistilBERT."""
    way = EncoderNames(
        "transformer.layer.{}.", _DISTILBERT_LAYER, TOP_NAMES, ("", "distilbert."), _DISTILBERT_HEAD
    )
    return encoder_map(spec, [way])


BERT = Family("bert", read_bert, bert_map)
BERT_CLASSIFIER = Family("bert_classifier", read_bert_classifier, bert_map)
DISTILBERT = Family("distilbert", read_distilbert, distilbert_map)
DISTILBERT_CLASSIFIER = Family("distilbert_classifier", read_distilbert_classifier, distilbert_map)
