"""`EncoderSpec`: an encoder of text as data. Its rows see each other both ways, and nothing is cached. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.rope_spec import RopeSpec

EncoderActivation = Literal["gelu", "gelu_tanh", "silu", "relu"]


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """What differs between the layers of one encoder."""

    window: int | None = None  # a row at p sees p − window … p + window; None: all
    rope: RopeSpec | None = None  # None: no rotary positions
    has_attn_norm: bool = True  # ModernBERT's first layer reads the norm of the embedding


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """A classifier of a text: ``out(norm(activation(dense(row))))``, the row of its first token or the mean of all."""

    labels: tuple[str, ...]
    score: Literal["sigmoid", "identity", "softmax"] = "sigmoid"  # logits to score
    rows: Literal["cls", "mean"] = "cls"
    activation: Literal["tanh", "gelu", "relu"] = "tanh"
    dense_bias: bool = True
    norm: bool = False


@dataclass(frozen=True, slots=True)
class VocabularyHead:
    """A logit per token of the vocabulary for a row, ``out(norm(activation(dense(row))))``, and one weight of them all.

    SPLADE (arXiv:2109.10086): the weight of a token in a text is log(1 + relu(logit)), the largest or the sum over its
    rows; ``log_twice``: of that weight the logarithm again (arXiv:2504.14839).
    """

    over_rows: Literal["max", "sum"] = "max"
    log_twice: bool = False
    activation: EncoderActivation = "gelu"
    dense_bias: bool = True
    tied: bool = True  # out is the table of the embedding


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """One encoder: what all of its layers share, and per layer an `EncoderLayer`."""

    layers: tuple[EncoderLayer, ...]
    num_heads: int
    head_dim: int
    intermediate_size: int
    activation: EncoderActivation = "gelu"
    gated: bool = False
    # post: norm(x + block(x)) (BERT); pre: x + block(norm(x)), and a last norm; sandwich: x + norm(block(norm(x)))
    norms: Literal["post", "pre", "sandwich"] = "post"
    norm: Literal["layer", "rms", "rms_plus_one"] = "layer"
    norm_bias: bool = True
    embed_norm: bool = True
    num_kv_heads: int = 0  # 0: as many as num_heads
    qk_norm: bool = False  # RMSNorm of each head of q and k
    scale: float | None = None  # multiplies q·k; None: head_dim^−½
    attn_bias: bool = True
    mlp_bias: Literal[True, False, "down"] = True
    num_positions: int = 0  # rows of the table of positions; 0: there is none
    first_position: int = 0  # row of the first token (RoBERTa: 2)
    num_token_types: int = 0
    pair_types: bool = True  # False: all tokens have type 0 (RoBERTa)
    relative_buckets: int = 0  # MPNet: a bias per head and bucket of distances
    embedding_scale: float = 1.0
    head: HeadSpec | None = None  # None: it classifies nothing
    vocabulary: VocabularyHead | None = None  # None: it gives no sparse vectors
