"""What llama.cpp's converter says of Gemma 4's layers, for `gguf_writer`."""

from __future__ import annotations

import gguf

from quire.modelspec import ModelSpec


def gemma4_metadata(writer: gguf.GGUFWriter, spec: ModelSpec) -> None:
    local = next(each for each in spec.attentions if each.window is not None)
    wide = next(each for each in spec.attentions if each.window is None)
    assert local.rope is not None
    widths = [layer.mlp.intermediate_size for layer in spec.layers]
    for key in ("attention.head_count_kv", "feed_forward_length"):
        writer.kv_data[0].pop(f"gemma4.{key}")
    if len(set(widths)) > 1:
        writer.add_feed_forward_length(widths)
    else:
        writer.add_feed_forward_length(widths[0])
    if local.num_kv_heads != wide.num_kv_heads:
        writer.add_head_count_kv([each.num_kv_heads for each in spec.attentions])
    else:
        writer.add_head_count_kv(wide.num_kv_heads)
    writer.add_shared_kv_layers(sum(spec.kv_source(i) != i for i in range(spec.num_layers)))
    writer.add_embedding_length_per_layer_input(spec.per_layer.embedding_size if spec.per_layer else 0)
    writer.add_sliding_window_pattern([each.window is not None for each in spec.attentions])
    writer.add_key_length_swa(local.head_dim)
    writer.add_value_length_swa(local.head_dim)
    writer.add_rope_freq_base_swa(local.rope.theta)
    writer.add_rope_dimension_count_swa(local.head_dim)
