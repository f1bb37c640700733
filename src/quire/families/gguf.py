"""GGUF: llama.cpp's metadata → the ``config.json`` that the same model has on the hub, and llama.cpp's tensor names.

Two conventions differ: files of architecture ``llama`` keep the rows of q and k in the pairwise order of llama.cpp's
RoPE (the loader restores them), and Gemma's norm weights already contain their 1."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from quire.errors import UnsupportedModelError
from quire.families import spec_from_config
from quire.families.llama import fused_takes
from quire.families.rope import yarn_mscale
from quire.families.shape import Fields
from quire.families.weights import Take, WeightMap, build_map
from quire.modelspec import ModelSpec

Floats = Callable[[str], tuple[float, ...] | None]  # the numbers of a small tensor
# general.architecture → architecture as in config.json.
ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
_DTYPES = {0: "float32", 1: "float16", 7: "bfloat16", 32: "bfloat16"}  # general.file_type; 7 is Q8_0

_TOP = {
    "embed.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_NAMES = {
    "attn_norm.weight": "attn_norm.weight",
    "mlp_norm.weight": "ffn_norm.weight",
    "attn_post_norm.weight": "post_attention_norm.weight",
    "mlp_post_norm.weight": "post_ffw_norm.weight",
    "attn.q_norm.weight": "attn_q_norm.weight",
    "attn.k_norm.weight": "attn_k_norm.weight",
    **{f"attn.{n}.{kind}": f"attn_{n}.{kind}" for n in ("q", "k", "v") for kind in ("weight", "bias")},
    **{f"attn.o.{kind}": f"attn_output.{kind}" for kind in ("weight", "bias")},
    **{f"mlp.{n}.{kind}": f"ffn_{n}.{kind}" for n in ("gate", "up", "down") for kind in ("weight", "bias")},
}
_ROPE_TENSORS = (r"rope_freqs\.weight", r"rope_factors_(long|short)\.weight", r"blk\.\d+\.attn_rot_embd.*")


def spec_from_gguf(
    metadata: Mapping[str, Any], tensors: Mapping[str, Any], floats: Floats, where: str
) -> ModelSpec:
    """Return the `ModelSpec` of a GGUF file.

    ``tensors``: anything by tensor name; ``floats``: the numbers of a small tensor or None; ``where``: the file, for
    errors. Raises the errors of `spec_from_config`.
    """
    config = config_from_gguf(metadata, tensors, floats, where)
    spec = spec_from_config(config, where)
    return replace(spec, norm_plus_one=False)


def config_from_gguf(
    metadata: Mapping[str, Any], tensors: Mapping[str, Any], floats: Floats, where: str
) -> dict[str, Any]:
    """Return the metadata under the keys of ``config.json``."""
    arch = Fields(metadata, where).text("general.architecture")
    if arch not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{where}: GGUF architecture {arch!r} is not supported; supported are {', '.join(ARCHITECTURES)} "
            "(more families load from safetensors)."
        )
    prefix = arch + "."
    f = Fields({k.removeprefix(prefix): v for k, v in metadata.items()}, f"{where}, {arch}")
    if f.integer("expert_count", 0, minimum=0):
        raise UnsupportedModelError(
            f"{where}: GGUF with experts is not supported; models with experts load from safetensors."
        )
    f = _one_value_each(f)
    heads = f.integer("attention.head_count")
    hidden = f.integer("embedding_length")
    head_dim = f.integer("attention.key_length", hidden // heads)
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[arch]],
        "vocab_size": f.integer("vocab_size", len(f.items("tokenizer.ggml.tokens")) or None),
        "hidden_size": hidden,
        "intermediate_size": f.integer("feed_forward_length"),
        "num_hidden_layers": f.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": f.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        # Stored as float32: rounding to seven digits restores the original decimal number.
        "rms_norm_eps": float(f"{f.number('attention.layer_norm_rms_epsilon'):.7g}"),
        "max_position_embeddings": f.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": any(re.fullmatch(r"blk\.\d+\.attn_(q|k|v|output)\.bias", name) for name in tensors),
        "mlp_bias": any(re.fullmatch(r"blk\.\d+\.ffn_(gate|up|down)\.bias", name) for name in tensors),
        "dtype": _DTYPES.get(int(metadata.get("general.file_type", 1)), "bfloat16"),
        "bos_token_id": special_id(metadata, "bos_token_id"),
        "eos_token_id": special_id(metadata, "eos_token_id"),
    }
    config |= _rope(f, head_dim, floats)
    if arch in ("gemma2", "gemma3"):
        config |= _gemma(f, arch, head_dim)
    elif arch == "phi3":
        config["sliding_window"] = f.optional_integer("attention.sliding_window", minimum=1)
    return config


# What llama.cpp assumes of a sentencepiece vocabulary whose file does not say it.
_SENTENCEPIECE_IDS = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}


def special_id(metadata: Mapping[str, Any], key: str) -> int | None:
    """Return the id ``tokenizer.ggml.{key}``, or llama.cpp's default where it is missing or no id of the vocabulary."""
    value, tokens = metadata.get(f"tokenizer.ggml.{key}"), metadata.get("tokenizer.ggml.tokens") or ()
    count = max(len(tokens), metadata.get(f"{metadata.get('general.architecture')}.vocab_size") or 0)
    if isinstance(value, int) and (0 <= value < count or not count):
        return value
    default = _SENTENCEPIECE_IDS.get(key) if metadata.get("tokenizer.ggml.model") == "llama" else None
    return default if default is not None and default < count else None


def _one_value_each(f: Fields) -> Fields:
    """Return the fields with one number where the file has an equal one for each layer."""
    values = dict(f.values)
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        listed = values.get(key)
        if isinstance(listed, list) and listed:
            if len(set(listed)) > 1 or len(listed) != f.integer("block_count"):
                raise f.wrong(key, "one number, or one for each of block_count layers, all equal")
            values[key] = listed[0]
    return Fields(values, f.where)


def _scaling(f: Fields) -> dict[str, Any]:
    """Return ``rope_scaling`` of the scaling keys, with llama.cpp's defaults; empty where nothing is scaled.

    A factor without a type is linear; ``rope.scale_linear`` is the factor's older name, and 0 stands for 1.
    """
    factor = f.number(
        "rope.scaling.factor", f.number("rope.scale_linear", 0.0, positive=False), positive=False
    )
    kind = f.text("rope.scaling.type", "linear")
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return {}
    for key in ("yarn_ext_factor", "yarn_attn_factor"):
        f.refuse(f"rope.scaling.{key}", unless=(1, 1.0), why="llama.cpp's own tuning of YaRN")
    f.refuse("rope.scaling.yarn_log_multiplier", unless=(0, 0.0), why="it is DeepSeek's")
    attention_factor = f.optional_number("rope.scaling.attn_factor")
    if attention_factor is not None and kind == "yarn":
        attention_factor *= yarn_mscale(factor)
    return {
        "rope_type": kind,
        "factor": factor or None,
        "attention_factor": attention_factor,
        "beta_fast": f.optional_number("rope.scaling.yarn_beta_fast"),
        "beta_slow": f.optional_number("rope.scaling.yarn_beta_slow"),
        "original_max_position_embeddings": f.optional_integer(
            "rope.scaling.original_context_length", minimum=1
        ),
    }


def _rope(f: Fields, head_dim: int, floats: Floats) -> dict[str, Any]:
    rotated = f.integer("rope.dimension_count", head_dim)
    config: dict[str, Any] = {"partial_rotary_factor": rotated / head_dim}
    if f.has("rope.freq_base"):
        config["rope_theta"] = f.number("rope.freq_base")
    original = f.optional_integer("rope.scaling.original_context_length", minimum=1)
    stated = _scaling(f)
    factors = floats("rope_freqs.weight")
    # Llama 3.1 and later: the scaling of each frequency, computed at conversion.
    if factors is not None:
        if stated and stated["rope_type"] != "linear":
            raise f.wrong("rope.scaling.type", "'linear' or 'none' beside rope_freqs.weight")
        factors = tuple(factor * stated["factor"] for factor in factors) if stated else factors
        scaling: dict[str, Any] = {"factor": 1.0, "attention_factor": 1.0, "rope_type": "longrope"}
        config["rope_scaling"] = scaling | {"short_factor": factors, "long_factor": factors}
    elif floats("rope_factors_long.weight") is not None:
        config["rope_scaling"] = {
            "rope_type": "longrope",
            "attention_factor": f.optional_number("rope.scaling.attn_factor"),
            "short_factor": floats("rope_factors_short.weight"),
            "long_factor": floats("rope_factors_long.weight"),
            "original_max_position_embeddings": original,
        }
    elif stated:
        config["rope_scaling"] = stated
    return config


def _gemma(f: Fields, arch: str, head_dim: int) -> dict[str, Any]:
    # The 27B models scale the scores by hidden_size / heads; the metadata lacks that, llama.cpp special-cases it.
    is_27b = f.integer("block_count") == (46 if arch == "gemma2" else 62)
    per_head = f.integer("embedding_length") // f.integer("attention.head_count")
    return {
        "query_pre_attn_scalar": per_head if is_27b else head_dim,
        "sliding_window": f.integer("attention.sliding_window", 4096 if arch == "gemma2" else None),
        "attn_logit_softcapping": f.number("attn_logit_softcapping", 50.0) if arch == "gemma2" else None,
        "final_logit_softcapping": f.number("final_logit_softcapping", 30.0) if arch == "gemma2" else None,
    }


def gguf_weight_map(spec: ModelSpec, arch: str) -> WeightMap:
    """Return where a GGUF file of architecture ``arch`` keeps each canonical weight."""
    rules = {"llama": _llama_rules, "phi3": _phi3_rules}.get(arch)
    weight_map = build_map(spec, _NAMES, rules, _ROPE_TENSORS, top=_TOP, layer_prefix="blk.{}.")
    sources = {
        name: (*takes, Take((), takes[0].shape)) if name.endswith(".bias") else takes  # each may be left out
        for name, takes in weight_map.sources.items()
    }
    return replace(weight_map, sources=sources)


def _llama_rules(spec: ModelSpec, index: int, prefix: str) -> dict[str, tuple[Take, ...]]:
    a = spec.layers[index].attention
    takes: dict[str, tuple[Take, ...]] = {}
    for name, heads in (("q", a.num_heads), ("k", a.num_kv_heads)):
        rows = heads * a.head_dim
        for kind, shape in (("weight", (rows, spec.hidden_size)), ("bias", (rows,))):
            takes[f"attn.{name}.{kind}"] = (
                Take((f"{prefix}attn_{name}.{kind}",), shape, unpermute_heads=heads),
            )
    return takes


def _phi3_rules(spec: ModelSpec, index: int, prefix: str) -> dict[str, tuple[Take, ...]]:
    return fused_takes(spec, index, f"{prefix}attn_qkv.weight", f"{prefix}ffn_up.weight")
