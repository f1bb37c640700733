"""XLM-RoBERTa (Conneau et al. 2019: BGE-M3, multilingual E5) and MPNet (Song et al. 2020), from BERT's layers.

Positions begin behind the row of the padding token in the table. MPNet has no types of tokens, and adds to each score a
number per head and bucket of distances, as T5 does (Raffel et al. 2019).
"""

from __future__ import annotations

from dataclasses import replace

from quire.families.bert import LAYER_NAMES, NAMES, TOP_NAMES, encoder_model, encoder_of, with_labels
from quire.families.encoder_names import encoder_map
from quire.families.shape import Fields
from quire.families.weights import Family, WeightMap
from quire.modelspec import ModelSpec

_MPNET_LAYER = {
    **LAYER_NAMES,
    **{f"attn.{part}": f"attention.attn.{part}" for part in "qkvo"},
    "attn_norm": "attention.LayerNorm",
}
_MPNET_TOP = {**TOP_NAMES, "relative": "encoder.relative_attention_bias"}
_HEAD = {"head.dense": "classifier.dense", "head.out": "classifier.out_proj"}


def read_xlm_roberta(f: Fields) -> ModelSpec:
    """Return the spec of an XLM-RoBERTa."""
    f.refuse("position_embedding_type", unless=("absolute",), why="only positions from a table are computed")
    f.refuse("is_decoder", unless=(False,), why="encoders see both ways")
    rows, first = f.integer("max_position_embeddings"), f.integer("pad_token_id", 1, minimum=0) + 1
    encoder = encoder_of(
        f,
        num_positions=rows,
        first_position=first,
        num_token_types=f.integer("type_vocab_size", 2),
        pair_types=False,
    )
    return encoder_model(f, "xlm_roberta", encoder, rows - first)


def read_xlm_roberta_classifier(f: Fields) -> ModelSpec:
    """Return the spec of an XLM-RoBERTa that classifies by its first row, such as BGE's rerankers."""
    return with_labels(f, read_xlm_roberta(f), "xlm_roberta_classifier")


def read_mpnet(f: Fields) -> ModelSpec:
    """Return the spec of an MPNet."""
    rows, first = f.integer("max_position_embeddings"), f.integer("pad_token_id", 1, minimum=0) + 1
    buckets = f.integer("relative_attention_num_buckets", 32)
    encoder = encoder_of(f, num_positions=rows, first_position=first, relative_buckets=buckets)
    return encoder_model(f, "mpnet", encoder, rows - first)


def roberta_map(spec: ModelSpec) -> WeightMap:
    """Map the weights of an XLM-RoBERTa, bare or with a head."""
    return encoder_map(spec, [replace(NAMES, prefixes=("", "roberta."), head=_HEAD)])


def mpnet_map(spec: ModelSpec) -> WeightMap:
    """Map the weights of an MPNet."""
    way = replace(NAMES, parts=_MPNET_LAYER, top=_MPNET_TOP, prefixes=("", "mpnet."))
    return encoder_map(spec, [way])


XLM_ROBERTA = Family("xlm_roberta", read_xlm_roberta, roberta_map)
XLM_ROBERTA_CLASSIFIER = Family("xlm_roberta_classifier", read_xlm_roberta_classifier, roberta_map)
MPNET = Family("mpnet", read_mpnet, mpnet_map)
