"""GGUF: llama.cpp's metadata → the ``config.json`` that the same model has on the hub.

Where the metadata has no key for a choice, llama.cpp's code makes it by architecture, and so does this module. Gemma's
norm weights already contain their 1. Tensor names are in `quire.families.gguf_maps`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from quire.errors import UnsupportedModelError
from quire.families import spec_from_config
from quire.families.gguf_experts import SIGMOID, decimal, deepseek_routing, experts
from quire.families.gguf_gemma4 import first_values, gemma4_config
from quire.families.gguf_hybrids import HYBRIDS, hybrid_config, one_value_each
from quire.families.rope import yarn_mscale
from quire.families.shape import Fields
from quire.modelspec import ModelSpec

Floats = Callable[[str], tuple[float, ...] | None]  # the numbers of a small tensor
# general.architecture → architecture as in config.json.
ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "apertus": "ApertusForCausalLM",
    "glm4moe": "Glm4MoeForCausalLM",
    "minimax-m2": "MiniMaxM2ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "deepseek2": "DeepseekV2ForCausalLM",
    **HYBRIDS,
}
_WITH_EXPERTS = (
    "llama", "qwen2moe", "qwen3moe", "gpt-oss", "deepseek2", "lfm2moe", "granitehybrid", "nemotron_h_moe", "glm4moe",
    "minimax-m2", "qwen35moe", "qwen3next",
)  # fmt: skip
_DTYPES = {0: "float32", 1: "float16", 7: "bfloat16", 32: "bfloat16"}  # general.file_type; 7 is Q8_0


# How numbers of each layer become one, where an architecture has layers of several sizes.
_ONE_EACH = {**dict.fromkeys(HYBRIDS, one_value_each), "gemma4": first_values}


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
    if arch == "clip" or metadata.get("general.type") == "mmproj":
        raise UnsupportedModelError(
            f"{where} is the projector of a model that reads images (mmproj); Quire runs text decoders: give the GGUF "
            "file of the model itself."
        )
    if arch not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{where}: GGUF architecture {arch!r} is not supported; supported are {', '.join(ARCHITECTURES)} "
            "(more families load from safetensors)."
        )
    listed = Fields({k.removeprefix(f"{arch}."): v for k, v in metadata.items()}, f"{where}, {arch}")
    f = _ONE_EACH.get(arch, _one_value_each)(listed)
    num_experts = f.integer("expert_count", 0, minimum=0)
    if num_experts and arch not in _WITH_EXPERTS:
        raise UnsupportedModelError(
            f"{where}: GGUF architecture {arch!r} with experts is not supported; with experts are "
            f"{', '.join(_WITH_EXPERTS)}."
        )
    heads, hidden = f.integer("attention.head_count"), f.integer("embedding_length")
    head_dim = f.integer("attention.key_length", hidden // heads)
    config: dict[str, Any] = {
        "architectures": [_architecture(f, arch)],
        "vocab_size": f.integer("vocab_size", len(f.items("tokenizer.ggml.tokens")) or None),
        "hidden_size": hidden,
        "intermediate_size": _width(f),
        "num_hidden_layers": num_layers(f),
        "num_attention_heads": heads,
        "num_key_value_heads": f.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": decimal(f.number("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": f.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": any(re.fullmatch(r"blk\.\d+\.attn_(q|k|v|output)\.bias", name) for name in tensors),
        "mlp_bias": any(re.fullmatch(r"blk\.\d+\.ffn_(gate|up|down)\.bias", name) for name in tensors),
        "attention_out_bias": "blk.0.attn_output.bias" in tensors,
        "dtype": _DTYPES.get(int(metadata.get("general.file_type", 1)), "bfloat16"),
        "bos_token_id": special_id(metadata, "bos_token_id"),
        "eos_token_id": special_id(metadata, "eos_token_id"),
    }
    if arch == "deepseek2":
        return config | _deepseek(f)
    if arch == "gemma4":
        return config | gemma4_config(f, listed, tensors, floats)
    config |= _rope(f, head_dim, floats)
    return config | _of_architecture(f, arch, config, tensors)


def _of_architecture(
    f: Fields, arch: str, config: dict[str, Any], tensors: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keys that only some architectures have."""
    if arch == "granite":
        return _granite(f, config["head_dim"])
    if arch in HYBRIDS:
        own = _granite(f, config["head_dim"]) if arch == "granitehybrid" else {}
        return own | hybrid_config(f, arch, config, tensors)
    if arch in ("gemma2", "gemma3"):
        return _gemma(f, arch, config["head_dim"])
    if arch == "phi3":
        return {"sliding_window": f.optional_integer("attention.sliding_window", minimum=1)}
    if arch == "olmo2":
        f.refuse("attention.sliding_window", unless=(), why="it is OLMo 3, which is another architecture")
    if arch == "exaone4":
        return _exaone4(f)
    if arch == "apertus":
        return _apertus(f, config)
    if arch == "ernie4_5":
        return {"use_bias": config["attention_bias"]}
    if arch == "glm4":
        why = "it is GLM-4V, whose rows of q and k are in another order"
        f.refuse("rope.dimension_sections", unless=(), why=why)
    return experts(f, arch, config, tensors) if f.integer("expert_count", 0, minimum=0) else {}


def num_layers(f: Fields) -> int:
    """Return the number of the decoder's layers: without those for multi-token prediction, which files count too."""
    count, extra = f.integer("block_count"), f.integer("nextn_predict_layers", 0, minimum=0)
    if extra >= count:
        raise f.wrong("nextn_predict_layers", f"fewer than block_count = {count}")
    return count - extra


def _architecture(f: Fields, arch: str) -> str:
    if arch == "llama" and f.integer("expert_count", 0, minimum=0):
        return "MixtralForCausalLM"
    if arch == "deepseek2" and f.integer("expert_gating_func", 1, minimum=0) == SIGMOID:
        return "DeepseekV3ForCausalLM"
    return ARCHITECTURES[arch]


def _width(f: Fields) -> int:
    """Return the width of a dense block; a file of experts alone may leave it out."""
    return f.integer("feed_forward_length", f.optional_integer("expert_feed_forward_length", minimum=1))


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


def _scaling(f: Fields, *, log_multiplier: bool = False) -> dict[str, Any]:
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
    if not log_multiplier:
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


def _exaone4(f: Fields) -> dict[str, Any]:
    """Return the window of the layers that have one: of three in four where the file does not say which."""
    key = "attention.sliding_window_pattern"
    is_32b = f.integer("block_count") == 64  # llama.cpp knows the one published size with windows by this
    config: dict[str, Any] = {
        "sliding_window": f.integer("attention.sliding_window", 4096) if is_32b else None
    }
    if f.has("attention.sliding_window"):
        config["sliding_window"] = f.integer("attention.sliding_window")
    if isinstance(f.values.get(key), list):
        slides = f.items(key)
        config["layer_types"] = [
            "sliding_attention" if has_window else "full_attention" for has_window in slides
        ]
    else:
        config["sliding_window_pattern"] = f.integer(key, 4)
    return config


def _apertus(f: Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    """Check the constants of the activation, and say that rotation is plain where the file has no factors for it."""
    for key, allowed in (("xielu.beta", 0.5), ("xielu.eps", -1e-6)):
        for value in f.numbers(key, config["num_hidden_layers"]) if f.has(key) else ():
            # A bfloat16 checkpoint has them rounded.
            if abs(value - allowed) > 0.01 * abs(allowed):
                raise f.wrong(key, f"{allowed} for each layer")
    if "rope_scaling" in config:
        return {}
    return {"rope_parameters": {"rope_type": "default", "rope_theta": config.get("rope_theta", 10_000.0)}}


def _granite(f: Fields, head_dim: int) -> dict[str, Any]:
    scale = f.number("attention.scale", 0.0, positive=False)
    return {
        "attention_multiplier": decimal(scale or head_dim**-0.5),
        "embedding_multiplier": decimal(f.number("embedding_scale", 1.0)),
        "residual_multiplier": decimal(f.number("residual_scale", 1.0)),
        "logits_scaling": decimal(f.number("logit_scale", 1.0)),
    }


def _deepseek(f: Fields) -> dict[str, Any]:
    """Return latent attention and routing."""
    rotated = f.integer("rope.dimension_count")
    key = f.integer("attention.key_length_mla", f.optional_integer("attention.key_length", minimum=1))
    if key <= rotated:
        raise f.wrong("attention.key_length_mla", f"greater than rope.dimension_count = {rotated}")
    config: dict[str, Any] = {
        "q_lora_rank": f.optional_integer("attention.q_lora_rank"),
        "kv_lora_rank": f.integer("attention.kv_lora_rank"),
        "qk_nope_head_dim": key - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": f.integer(
            "attention.value_length_mla", f.optional_integer("attention.value_length", minimum=1)
        ),
        **deepseek_routing(f),
    }
    if _architecture(f, "deepseek2") == "DeepseekV2ForCausalLM":
        config["topk_method"] = "group_limited_greedy" if config["n_group"] > 1 else "greedy"
    if f.has("rope.freq_base"):
        config["rope_theta"] = f.number("rope.freq_base")
    scaling = _scaling(f, log_multiplier=True)
    if scaling:
        # A tenth of mscale_all_dim, which is mscale in every published model: both factors on cos and sin cancel.
        all_dim = decimal(10 * f.number("rope.scaling.yarn_log_multiplier", 0.0, positive=False))
        config["rope_scaling"] = scaling | {
            "mscale": all_dim,
            "mscale_all_dim": all_dim,
            "attention_factor": 1.0,
        }
    return config
