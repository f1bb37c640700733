"""GGUF of Gemma 4, the text decoder, in the form that llama.cpp's converter writes.

Sizes of global and of local layers have keys of their own, or a number for each layer. Which part of a head rotates in
global layers shows in the factors of their frequencies: 1, or so large that nothing turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.errors import UnsupportedModelError
from quire.families.shape import Fields
from quire.modelspec import ModelSpec

Floats = Callable[[str], tuple[float, ...] | None]
NAMES: Mapping[str, str] = {
    "per_layer.scale": "layer_output_scale.weight",
    "per_layer.gate.weight": "inp_gate.weight",
    "per_layer.out.weight": "proj.weight",
    "per_layer.norm.weight": "post_norm.weight",
}
TOP: Mapping[str, str] = {
    "per_layer.table.weight": "per_layer_token_embd.weight",
    "per_layer.projection.weight": "per_layer_model_proj.weight",
    "per_layer.norm.weight": "per_layer_proj_norm.weight",
}


def first_values(f: Fields) -> Fields:
    """Return the fields with the first layer's number in place of a list of all; `gemma4_config` reads the lists."""
    values = dict(f.values)
    for key in ("attention.head_count_kv", "feed_forward_length"):
        values[key] = _of_layers(f, key)[0]
    return Fields(values, f.where)


def gemma4_config(f: Fields, listed: Fields, tensors: Mapping[str, Any], floats: Floats) -> dict[str, Any]:
    """Return what ``config.json`` has beside the keys of all models; ``listed``: the fields with their lists."""
    count, shared = f.integer("block_count"), f.integer("attention.shared_kv_layers", 0, minimum=0)
    slides = [bool(value) for value in f.items("attention.sliding_window_pattern")]
    if len(slides) != count or shared >= count:
        raise f.wrong("attention.sliding_window_pattern", f"a list of block_count = {count} flags")
    kv_heads, widths = (
        _of_layers(listed, "attention.head_count_kv"),
        _of_layers(listed, "feed_forward_length"),
    )
    factor = widths[-1] // widths[0]
    if factor not in (1, 2) or widths != [widths[0]] * (count - shared) + [widths[0] * factor] * shared:
        raise listed.wrong(
            "feed_forward_length", "one number, twice as large in layers that share K and V, or equal"
        )
    own = (f.integer("attention.key_length_swa"), f.integer("attention.key_length"))
    sizes = {
        str(i): {"head_dim": own[not slides[i]], "num_key_value_heads": kv_heads[i]} for i in range(count)
    }
    return {
        "head_dim": own[0],
        "layer_types": ["sliding_attention" if has_window else "full_attention" for has_window in slides],
        "sliding_window": f.integer("attention.sliding_window"),
        "per_layer_config": sizes,
        "attention_k_eq_v": any(f"blk.{i}.attn_v.weight" not in tensors for i in range(count - shared)),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": factor == 2,
        "hidden_size_per_layer_input": f.integer("embedding_length_per_layer_input", 0, minimum=0),
        "vocab_size_per_layer_input": f.integer("vocab_size", len(f.items("tokenizer.ggml.tokens")) or None),
        "final_logit_softcapping": f.optional_number("final_logit_softcapping"),
        "rope_parameters": {
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": f.number("rope.freq_base_swa", 10_000.0),
            },
            "full_attention": {"rope_theta": f.number("rope.freq_base"), **_part(f, own[1], floats)},
        },
    }


def _of_layers(f: Fields, key: str) -> list[int]:
    count, value = f.integer("block_count"), f.values.get(key)
    if not isinstance(value, list):
        return [f.integer(key)] * count
    numbers = list(f.integers(key))
    if len(numbers) != count or not all(numbers):
        raise f.wrong(key, f"a number, or a list of block_count = {count} numbers")
    return numbers


def _part(f: Fields, head_dim: int, floats: Floats) -> dict[str, Any]:
    factors = floats("rope_freqs.weight")
    if factors is None:
        return {"rope_type": "default"}
    turning = sum(factor == 1.0 for factor in factors)
    # A frequency divided by so much does not turn in any context.
    stand_still = all(factor > 1e20 for factor in factors[turning:])
    if len(factors) != head_dim // 2 or factors[:turning] != (1.0,) * turning or not stand_still:
        raise UnsupportedModelError(
            f"{f.where}: rope_freqs.weight has factors other than 1 and, after these, of frequencies that stand "
            "still; Gemma 4 has no others."
        )
    return {"rope_type": "proportional", "partial_rotary_factor": turning / len(factors)}


def shared_tensors(spec: ModelSpec) -> tuple[str, ...]:
    """Return patterns of what files hold of layers that read another's K and V."""
    shared = "|".join(str(i) for i in range(spec.num_layers) if spec.kv_source(i) != i)
    return (rf"blk\.({shared})\.(attn_k|attn_v|attn_k_norm)\.weight",) if shared else ()
