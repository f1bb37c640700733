"""Heads of masked tokens, of which SPLADE makes sparse vectors: their form and stored names in each family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from quire.encoder_spec import EncoderSpec, VocabularyHead
from quire.errors import UnsupportedModelError
from quire.families.shape import Fields, activation


def _names(dense: str, norm: str, out: str, bias: str) -> dict[str, str]:
    return {
        **{f"vocabulary.dense.{kind}": f"{dense}.{kind}" for kind in ("weight", "bias")},
        **{f"vocabulary.norm.{kind}": f"{norm}.{kind}" for kind in ("weight", "bias")},
        "vocabulary.out.weight": f"{out}.weight",
        "vocabulary.out.bias": bias,
    }


_BERT = "cls.predictions"
_ROBERTA = _names("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")
# Family → canonical name → stored name.
STORED: Mapping[str, Mapping[str, str]] = {
    "bert": _names(
        f"{_BERT}.transform.dense", f"{_BERT}.transform.LayerNorm", f"{_BERT}.decoder", f"{_BERT}.bias"
    ),
    "xlm_roberta": _ROBERTA,
    "mpnet": _ROBERTA,
    "distilbert": _names("vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias"),
    "modernbert": _names("head.dense", "head.norm", "decoder", "decoder.bias"),
}


def with_vocabulary(
    f: Fields, family: str, encoder: EncoderSpec, over_rows: Literal["max", "sum"], *, log_twice: bool
) -> EncoderSpec:
    """Return ``encoder`` with the head of masked tokens that the configuration ``f`` describes.

    Raises:
        UnsupportedModelError: the family has none, or another one than is computed.
    """
    if family not in STORED or encoder.head is not None:
        raise UnsupportedModelError(
            f"{f.where}: sparse vectors are supported of {', '.join(STORED)} with a head of masked tokens."
        )
    kind = encoder.activation if family in ("bert", "distilbert") else "gelu"
    dense_bias = True
    if family == "modernbert":
        f.refuse("decoder_bias", unless=(True,), why="the head of masked tokens has a bias per token")
        read = activation(f, default="gelu", key="classifier_activation")
        assert read != "swiglu_oai", read
        kind, dense_bias = read, f.flag("classifier_bias", False)
    head = VocabularyHead(over_rows, log_twice, kind, dense_bias, tied=f.flag("tie_word_embeddings", True))
    return replace(encoder, vocabulary=head)
