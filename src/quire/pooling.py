"""What a request wants of its prompt's rows in place of text, and how the makers of a model pool them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from quire.errors import RequestError, clip

PoolingMode = Literal["cls", "mean", "max", "mean_sqrt_len", "weighted_mean", "last"]
PoolingKind = PoolingMode | Literal["logprobs", "classify", "logits", "tokens", "sparse"]


@dataclass(frozen=True, slots=True)
class Pooling:
    """What a request wants of its prompt's hidden states (after the last norm) instead of an answer.

    "logprobs": log-probabilities of ``token_ids`` as the next token. The others: [hidden_size], not normalised; of a
    decoder "last" or "mean", of an encoder those of `quire.layers.pooled_rows`; "classify": a classifier's scores,
    "logits": what they are made of; "tokens": all rows of an encoder, one after the other; "sparse": the ids of tokens
    and then as many weights.
    ``second_from``: where the second text of a pair begins; 0: there is one text.
    """

    kind: PoolingKind
    token_ids: tuple[int, ...] = ()
    second_from: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("logprobs", "classify", "logits", "tokens", "sparse", *get_args(PoolingMode)):
            raise RequestError(
                f"pooling = {clip(self.kind)} is not allowed: it must be 'last' or 'mean'.", param="pooling"
            )

    @property
    def whole_prompt(self) -> bool:
        """Whether every row of the prompt is needed, so that none may come from the prefix cache."""
        return self.kind == "mean"


@dataclass(frozen=True, slots=True)
class SentenceSpec:
    """How rows become one vector per text, as the files of sentence-transformers say it."""

    pooling: PoolingMode
    normalize: bool = True
    max_tokens: int | None = None  # per text, special tokens included
    prompts: tuple[tuple[str, str], ...] = ()  # name and text put before a text
    default_prompt: str | None = None
    # A model with labels is a classifier, and gives no vectors.
    labels: tuple[str, ...] = ()
    yes_no: tuple[int, int] | None = None  # ids of both words, of a decoder that ranks
    sparse: bool = False  # a weight per token of the vocabulary in place of a vector
    # A decoder's labels: from logits to scores. Of an encoder `HeadSpec` says it.
    score: Literal["sigmoid", "identity", "softmax"] = "sigmoid"
