"""`keys_of`: which keys of ``config.json`` decide whether a tensor exists and which shape it has, for errors.

A tensor that is missing, left over or of another shape is how a wrong key shows; the error names those to look at.
"""

from __future__ import annotations

import re

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_WHICH_LAYERS = ("first_k_dense_replace", "mlp_only_layers", "decoder_sparse_step")
_HEADS = ("num_attention_heads", "head_dim", "hidden_size")
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# The end of a tensor's name in a safetensors checkpoint → keys; the first that matches counts.
_KEYS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"lm_head\.weight", ("tie_word_embeddings", "vocab_size", "hidden_size")),
    (r"embed_tokens\.weight", ("vocab_size", "hidden_size")),
    (r"self_attn\.\w+\.bias", ("attention_bias", "qkv_bias", "attention_out_bias", "use_bias")),
    (r"self_attn\.(q_a|kv_a|kv_b|q_b)_\w+\.weight", (*_LATENT, "num_attention_heads", "hidden_size")),
    (r"self_attn\.[kv]_proj\.weight", ("num_key_value_heads", *_HEADS)),
    (r"self_attn\.qkv_proj\.weight", ("num_key_value_heads", *_HEADS)),
    (r"self_attn\.[qo]_proj\.weight", (*_HEADS, *_LATENT)),
    (r"self_attn\.[qk]_norm\.weight",
     ("use_qk_norm", "head_dim", "num_attention_heads", "num_key_value_heads", "hidden_size")),
    (r"self_attn\.sinks", ("num_attention_heads",)),
    (r"mlp\.shared_experts?(_gate)?\..*",
     ("n_shared_experts", "shared_expert_intermediate_size", "moe_intermediate_size", "hidden_size", *_WHICH_LAYERS)),
    (r"(mlp|block_sparse_moe)\.(experts|gate|router)\b.*",
     (*_EXPERTS, "moe_intermediate_size", "intermediate_size", "hidden_size", *_WHICH_LAYERS)),
    (r"mlp\.\w+\.bias", ("mlp_bias", "use_bias")),
    (r"mlp\.\w+\.weight", ("intermediate_size", "hidden_size", *_WHICH_LAYERS)),
    (r"norm\w*\.weight", ("hidden_size",)),
)  # fmt: skip
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def keys_of(
    name: str, num_layers: int, of_family: tuple[tuple[str, tuple[str, ...]], ...] = ()
) -> tuple[str, ...]:
    """Return the keys that decide about the tensor ``name`` of a model of ``num_layers`` layers, if any are known.

    ``of_family``: as `_KEYS`, for what one family has; its keys come first.
    """
    layer = _LAYER.match(name)
    named: tuple[str, ...] = ()
    for table in (of_family, _KEYS):
        named += next((keys for pattern, keys in table if re.search(rf"{pattern}$", name)), ())
    if layer is not None and int(layer[1]) >= num_layers - 1:  # one too many, or one too few
        return ("num_hidden_layers", *named)
    return named
