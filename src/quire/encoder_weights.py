"""Canonical names and shapes of the weights of an encoder (`EncoderSpec`).

What ends in ``.table`` is looked up and never multiplied:

    embed.weight [vocab, hidden]   positions.table [positions, hidden]   types.table [types, hidden]
    embed_norm.{weight,bias}, layers.{i}.{attn_norm,mlp_norm}.{weight,bias}, final_norm.{weight,bias}   [hidden]
    layers.{i}.{attn_post_norm,mlp_post_norm}.weight [hidden]   layers.{i}.attn.{q_norm,k_norm}.weight [head_dim]
    layers.{i}.attn.{q,k,v,o}.{weight,bias}   layers.{i}.mlp.{gate,up,down}.{weight,bias}
    relative.table [buckets, heads]
    head.dense.{weight,bias} [hidden, hidden]   head.norm.{weight,bias} [hidden]
    head.out.{weight,bias} [labels, hidden]
    vocabulary.dense.{weight,bias} [hidden, hidden]   vocabulary.norm.{weight,bias} [hidden]
    vocabulary.out.{weight,bias} [vocab, hidden]
"""

from __future__ import annotations

from quire.encoder_spec import EncoderSpec


def encoder_shapes(encoder: EncoderSpec, vocab_size: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Canonical name → shape of every weight, in the order in which they are loaded."""
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (vocab_size, hidden)}
    if encoder.num_positions:
        shapes["positions.table"] = (encoder.num_positions, hidden)
    if encoder.num_token_types:
        shapes["types.table"] = (encoder.num_token_types, hidden)
    if encoder.relative_buckets:
        shapes["relative.table"] = (encoder.relative_buckets, encoder.num_heads)
    norms = [("embed_norm", hidden)] if encoder.embed_norm else []
    if (head := encoder.head) is not None:
        for name, size in (("dense", hidden), ("out", len(head.labels))):
            shapes[f"head.{name}.weight"] = (size, hidden)
            if name == "out" or head.dense_bias:
                shapes[f"head.{name}.bias"] = (size,)
        norms += [("head.norm", hidden)] if head.norm else []
    if encoder.vocabulary is not None:
        shapes["vocabulary.dense.weight"] = (hidden, hidden)
        shapes |= {"vocabulary.dense.bias": (hidden,)} if encoder.vocabulary.dense_bias else {}
        shapes |= {"vocabulary.out.weight": (vocab_size, hidden), "vocabulary.out.bias": (vocab_size,)}
        norms.append(("vocabulary.norm", hidden))
    for index in range(len(encoder.layers)):
        of_layer, layer_norms = _layer_shapes(encoder, index, hidden)
        shapes |= of_layer
        norms += layer_norms
    norms += [("final_norm", hidden)] if encoder.norms != "post" else []
    for name, size in norms:
        shapes[f"{name}.weight"] = (size,)
        if encoder.norm_bias:
            shapes[f"{name}.bias"] = (size,)
    return shapes


def _layer_shapes(
    encoder: EncoderSpec, index: int, hidden: int
) -> tuple[dict[str, tuple[int, ...]], list[tuple[str, int]]]:
    """Return the shapes of a layer's linears and heads' norms, and the names and sizes of its other norms."""
    prefix, size = f"layers.{index}.", encoder.head_dim
    width, of_keys = encoder.num_heads * size, kv_heads(encoder) * size
    linears = {"attn.q": (width, hidden), "attn.k": (of_keys, hidden), "attn.v": (of_keys, hidden)}
    linears["attn.o"] = (hidden, width)
    linears |= {"mlp.gate": (encoder.intermediate_size, hidden)} if encoder.gated else {}
    linears |= {
        "mlp.up": (encoder.intermediate_size, hidden),
        "mlp.down": (hidden, encoder.intermediate_size),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in linears.items():
        shapes[f"{prefix}{name}.weight"] = shape
        if encoder.attn_bias if name.startswith("attn") else has_mlp_bias(encoder, name.partition(".")[2]):
            shapes[f"{prefix}{name}.bias"] = shape[:1]
    if encoder.qk_norm:
        shapes |= {f"{prefix}attn.{part}_norm.weight": (size,) for part in "qk"}
    return shapes, [(f"{prefix}{name}", hidden) for name in layer_norms(encoder, index)]


def layer_norms(encoder: EncoderSpec, index: int) -> tuple[str, ...]:
    """Return the names of a layer's norms."""
    names = ("attn_norm", "mlp_norm") if encoder.layers[index].has_attn_norm else ("mlp_norm",)
    return (*names, "attn_post_norm", "mlp_post_norm") if encoder.norms == "sandwich" else names


def has_mlp_bias(encoder: EncoderSpec, part: str) -> bool:
    """Whether ``part`` of an MLP, gate, up or down, has a bias."""
    return encoder.mlp_bias is True or encoder.mlp_bias == part


def kv_heads(encoder: EncoderSpec) -> int:
    """Return the number of heads of k and of v."""
    return encoder.num_kv_heads or encoder.num_heads
