"""BERT (Devlin et al. 2018): an encoder with a table of positions, and a norm after each block.

A checkpoint has the names of the bare model, or those of a model with a head, after "bert.".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from quire.encoder_spec import EncoderLayer, EncoderSpec
from quire.errors import UnsupportedModelError
from quire.families.shape import Fields, activation, dtype_of
from quire.families.weights import Family, Take, WeightMap
from quire.modelspec import ModelSpec, weight_shapes

# After "encoder.layer.{i}.".
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
    "embed.weight": "embeddings.word_embeddings.weight",
    "positions.table": "embeddings.position_embeddings.weight",
    "types.table": "embeddings.token_type_embeddings.weight",
    "embed_norm.weight": "embeddings.LayerNorm.weight",
    "embed_norm.bias": "embeddings.LayerNorm.bias",
}
# Buffers, and heads of training that no embedding reads.
IGNORED = (r"(\w+\.)?embeddings\.position_ids", r"(\w+\.)?pooler\..*", r"(cls|lm_head)\..*")
_SCORES: Mapping[str, Literal["sigmoid", "identity"]] = {
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.linear.Identity": "identity",
}
BERT_HEAD: Mapping[str, str] = {"head.dense": "pooler.dense", "head.out": "classifier"}


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


def with_labels(f: Fields, spec: ModelSpec, family: str) -> ModelSpec:
    """Return ``spec`` with a classifier of the labels in ``id2label``, or of ``num_labels``."""
    assert spec.encoder is not None
    names = f.nested("id2label")
    count = f.integer("num_labels", 2 if names is None else len(names.values))
    labels = tuple(f"LABEL_{i}" if names is None else names.text(str(i)) for i in range(count))
    encoder = replace(spec.encoder, labels=labels, score=_score_of(f))
    return replace(spec, family=family, encoder=encoder)


def _score_of(f: Fields) -> Literal["sigmoid", "identity"]:
    """Return what sentence-transformers applies to the one logit of a cross-encoder: in the file, or the sigmoid."""
    # The second place is that of files from before its version 4.
    newer = f.nested("sentence_transformers")
    for fields, key in ((newer, "activation_fn"), (f, "sbert_ce_default_activation_function")):
        if fields is not None and fields.has(key):
            fields.refuse(key, unless=tuple(_SCORES), why="scores are sigmoids of logits, or the logits")
            return _SCORES[fields.text(key)]
    return "sigmoid"


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


def bert_map(
    spec: ModelSpec, names: Mapping[str, str] = LAYER_NAMES, top: Mapping[str, str] = TOP_NAMES,
    prefixes: tuple[str, ...] = ("", "bert."), head: Mapping[str, str] = BERT_HEAD,
) -> WeightMap:  # fmt: skip
    """Map the weights of an encoder by the names of its layers, after any of ``prefixes``."""
    sources: dict[str, tuple[Take, ...]] = {}
    for canonical, shape in weight_shapes(spec).items():
        if canonical.startswith("layers."):
            _, index, rest = canonical.split(".", 2)
            part, _, kind = rest.rpartition(".")
            stored = f"encoder.layer.{index}.{names[part]}.{kind}"
        elif canonical.startswith("head."):
            part, _, kind = canonical.rpartition(".")
            stored = f"{head[part]}.{kind}"
        else:
            stored = top[canonical]
        sources[canonical] = tuple(Take((prefix + stored,), shape) for prefix in prefixes)
    return WeightMap(sources, IGNORED, 0)


BERT = Family("bert", read_bert, bert_map)
BERT_CLASSIFIER = Family("bert_classifier", read_bert_classifier, bert_map)
