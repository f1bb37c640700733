"""`EncoderSpec`: an encoder of text as data. Its rows see each other both ways, and nothing is cached. Torch-free.

Canonical weight names, with shapes; what ends in ``.table`` is looked up and never multiplied:

    embed.weight [vocab, hidden]   positions.table [positions, hidden]   types.table [types, hidden]
    embed_norm.{weight,bias}, layers.{i}.{attn_norm,mlp_norm}.{weight,bias}, final_norm.{weight,bias}   [hidden]
    layers.{i}.attn.{q,k,v,o}.{weight,bias}   layers.{i}.mlp.{gate,up,down}.{weight,bias}
    relative.table [buckets, heads]
    head.dense.{weight,bias} [hidden, hidden]   head.out.{weight,bias} [labels, hidden]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.pooling import SentenceSpec

EncoderActivation = Literal["gelu", "gelu_tanh", "silu", "relu"]


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """What differs between the layers of one encoder."""

    window: int | None = None  # a row at p sees p − window … p + window; None: all
    rope_theta: float = 0.0  # 0: no rotary positions
    has_attn_norm: bool = True  # ModernBERT's first layer reads the norm of the embedding


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """One encoder: what all of its layers share, and per layer an `EncoderLayer`."""

    layers: tuple[EncoderLayer, ...]
    num_heads: int
    head_dim: int
    intermediate_size: int
    activation: EncoderActivation = "gelu"
    gated: bool = False
    # post: norm(x + block(x)) (BERT); pre: x + block(norm(x)), and a last norm
    norms: Literal["post", "pre"] = "post"
    norm_bias: bool = True
    attn_bias: bool = True
    mlp_bias: bool = True
    num_positions: int = 0  # rows of the table of positions; 0: there is none
    first_position: int = 0  # row of the first token (RoBERTa: 2)
    num_token_types: int = 0
    pair_types: bool = True  # False: all tokens have type 0 (RoBERTa)
    relative_buckets: int = 0  # MPNet: a bias per head and bucket of distances
    # A classifier reads the first row; without labels there is none.
    labels: tuple[str, ...] = ()
    # What makes a classifier's logits its scores.
    score: Literal["sigmoid", "identity"] = "sigmoid"
    sentence: SentenceSpec | None = None


def encoder_shapes(encoder: EncoderSpec, vocab_size: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Canonical name → shape of every weight, in the order in which they are loaded."""
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (vocab_size, hidden)}
    if encoder.num_positions:
        shapes["positions.table"] = (encoder.num_positions, hidden)
    if encoder.num_token_types:
        shapes["types.table"] = (encoder.num_token_types, hidden)
    if encoder.relative_buckets:
        shapes["relative.table"] = (encoder.relative_buckets, encoder.num_heads)
    if encoder.labels:
        for name, size in (("dense", hidden), ("out", len(encoder.labels))):
            shapes |= {f"head.{name}.weight": (size, hidden), f"head.{name}.bias": (size,)}
    norms = [("embed_norm", hidden)]
    width, inter = encoder.num_heads * encoder.head_dim, encoder.intermediate_size
    for index, layer in enumerate(encoder.layers):
        prefix = f"layers.{index}."
        linears = {f"attn.{part}": (width, hidden) for part in "qkv"} | {"attn.o": (hidden, width)}
        linears |= {"mlp.gate": (inter, hidden)} if encoder.gated else {}
        linears |= {"mlp.up": (inter, hidden), "mlp.down": (hidden, inter)}
        for name, shape in linears.items():
            shapes[f"{prefix}{name}.weight"] = shape
            if encoder.attn_bias if name.startswith("attn") else encoder.mlp_bias:
                shapes[f"{prefix}{name}.bias"] = shape[:1]
        norms += [(f"{prefix}attn_norm", hidden)] if layer.has_attn_norm else []
        norms += [(f"{prefix}mlp_norm", hidden)]
    norms += [("final_norm", hidden)] if encoder.norms == "pre" else []
    for name, size in norms:
        shapes[f"{name}.weight"] = (size,)
        if encoder.norm_bias:
            shapes[f"{name}.bias"] = (size,)
    return shapes
