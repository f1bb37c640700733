"""Families of models: ``config.json`` → `ModelSpec`, and where their checkpoints keep each weight. Strings only.

A family is in `SUPPORTED` only with a parity test against transformers (``tests/parity``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.families.quantization import read_quantization
from quire.families.quantization_scheme import Quantization
from quire.families.shape import Fields
from quire.families.weights import Family, Take, WeightMap
from quire.modelspec import ModelSpec

__all__ = [
    "SUPPORTED", "Family", "Take", "WeightMap", "decoder_config", "quantization_of", "spec_from_config", "weight_map",
]  # fmt: skip

# Family → the architecture in config.json, and the module here that has it under its name in capitals. A module is
# imported when a model of it is read.
_FAMILIES: dict[str, tuple[str, str]] = {
    "llama": ("LlamaForCausalLM", "llama"),
    "mistral": ("MistralForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen"),
    "qwen3": ("Qwen3ForCausalLM", "qwen"),
    "gemma2": ("Gemma2ForCausalLM", "gemma"),
    "gemma3": ("Gemma3ForCausalLM", "gemma"),
    "gemma4": ("Gemma4ForCausalLM", "gemma4"),
    "phi3": ("Phi3ForCausalLM", "llama"),
    "olmo2": ("Olmo2ForCausalLM", "olmo"),
    "olmo3": ("Olmo3ForCausalLM", "olmo"),
    "exaone4": ("Exaone4ForCausalLM", "olmo"),
    "granite": ("GraniteForCausalLM", "llama"),
    "smollm3": ("SmolLM3ForCausalLM", "llama"),
    "ernie4_5": ("Ernie4_5ForCausalLM", "llama"),
    "seed_oss": ("SeedOssForCausalLM", "llama"),
    "apertus": ("ApertusForCausalLM", "apertus"),
    "mixtral": ("MixtralForCausalLM", "llama"),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "qwen"),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "qwen"),
    "qwen3_5": ("Qwen3_5ForCausalLM", "qwen_hybrid"),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", "qwen_hybrid"),
    "qwen3_next": ("Qwen3NextForCausalLM", "qwen_hybrid"),
    "lfm2": ("Lfm2ForCausalLM", "lfm"),
    "lfm2_moe": ("Lfm2MoeForCausalLM", "lfm"),
    "lfm3": ("Lfm3ForCausalLM", "lfm"),
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM", "granite_hybrid"),
    "nemotron_h": ("NemotronHForCausalLM", "nemotron"),
    "falcon_h1": ("FalconH1ForCausalLM", "falcon"),
    "gpt_oss": ("GptOssForCausalLM", "gpt_oss"),
    "deepseek_v2": ("DeepseekV2ForCausalLM", "deepseek"),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "deepseek"),
    "glm4": ("Glm4ForCausalLM", "glm"),
    "glm4_moe": ("Glm4MoeForCausalLM", "glm"),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", "glm"),
    "minimax_m2": ("MiniMaxM2ForCausalLM", "minimax"),
    "hunyuan_v1_dense": ("HunYuanDenseV1ForCausalLM", "hunyuan"),
    "ministral3": ("Ministral3ForCausalLM", "ministral"),
    "mistral4": ("Mistral4ForCausalLM", "ministral"),
    "cohere": ("CohereForCausalLM", "cohere"),
    "cohere2": ("Cohere2ForCausalLM", "cohere"),
    "kimi_linear": ("KimiLinearForCausalLM", "kimi"),
    "bailing_hybrid": ("BailingHybridForCausalLM", "kimi"),
}
# Families whose rows see each other both ways, loaded where a name is none of the others.
_ENCODERS = "quire.families.encoder_table"
# model_type in config.json → family, where they differ.
_MODEL_TYPES = {
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
}
_BY_ARCHITECTURE = {architecture: name for name, (architecture, _) in _FAMILIES.items()}
_BY_ARCHITECTURE["BailingMoeV3ForCausalLM"] = "bailing_hybrid"  # in published files of Ling 3

# Models that see or hear, of which the text decoder runs: its family has what ``text_config`` says.
_WITH_TEXT = {
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Mistral3ForConditionalGeneration": "mistral",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
    "Idefics3ForConditionalGeneration": "llama",
    "SmolVLMForConditionalGeneration": "llama",
    "Qwen2_5_VLForConditionalGeneration": "qwen2",
    "Qwen3VLForConditionalGeneration": "qwen3",
}
_OF_ALL_PARTS = (
    "quantization_config", "dtype", "torch_dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id",
)  # fmt: skip

# Names as in "architectures" of config.json.
SUPPORTED: tuple[str, ...] = tuple(architecture for architecture, _ in _FAMILIES.values())  # decoders

# Parts of a configuration that mean more than a text decoder.
_OTHER_PARTS = ("vision_config", "audio_config", "encoder", "text_config")


def spec_from_config(config: Mapping[str, Any], where: str = "config.json") -> ModelSpec:
    """Return the `ModelSpec` of a ``config.json``; ``where`` is what errors call the file.

    Raises `UnsupportedModelError` for an architecture or feature that Quire does not run, with its name and what
    is supported, and `ModelLoadError` for a missing or wrong value, with its key.
    """
    outer, config = config, decoder_config(config, where)
    name = _name_of(Fields(config, where))
    family, architecture = _family(name), _place(name)[0]
    f = Fields({**config, "architectures": [architecture]}, where)
    for part in _OTHER_PARTS:
        if f.has(part):
            raise UnsupportedModelError(
                f"{where}: {architecture} with {part} is not supported: Quire runs text decoders, "
                f"as they are in {', '.join(SUPPORTED)}."
            )
    if name in _FAMILIES:
        f.refuse("is_causal", unless=(True,), why="decoders attend to the past only")
        f.refuse(
            "use_bidirectional_attention", unless=(False, "vision"), why="decoders attend to the past only"
        )
    quantization = f.nested("quantization_config")
    if quantization is not None and quantization.values.get("quant_method") not in family.quantizations:
        read_quantization(f, others=family.quantizations)
    spec = family.read(f)
    if config is not outer:  # whose encoder may run, too
        spec = replace(spec, vision=import_module("quire.families.vision").read_vision(outer, spec, where))
    return spec


def quantization_of(config: Mapping[str, Any], where: str = "config.json") -> Quantization | None:
    """Return how the linears of a checkpoint are quantized; None: they are not, or the family's weight map knows."""
    f = Fields(decoder_config(config, where), where)
    return read_quantization(f, others=_family(_name_of(f)).quantizations)


def decoder_config(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the text decoder's configuration: ``config``, or its ``text_config`` and what is said of all parts."""
    f = Fields(config, where)
    family = next((_WITH_TEXT[name] for name in f.items("architectures") if name in _WITH_TEXT), None)
    text = None if family is None else import_module("quire.families.vision").text_part(f)
    if family is None or text is None:
        return config
    kind = text.values.get("model_type")
    family = kind if family == "mistral" and kind in ("ministral3", "mistral4") else family
    # The whole model is tied or not by what is said of the whole, as in transformers.
    shared = {
        key: config[key]
        for key in _OF_ALL_PARTS
        if key in config and (key == "tie_word_embeddings" or text.values.get(key) is None)
    }
    return {**text.values, **shared, "architectures": [_FAMILIES[family][0]]}


def _family(name: str) -> Family:
    family = getattr(import_module(f"quire.families.{_place(name)[1]}"), name.upper())
    assert isinstance(family, Family)
    return family


def _place(name: str) -> tuple[str, str]:
    """Return the architecture of a family, and its module."""
    place: tuple[str, str] = _FAMILIES.get(name) or import_module(_ENCODERS).ENCODERS[name]
    return place


def _name_of(f: Fields) -> str:
    """Return the family of the first name in ``architectures`` that is known, else of ``model_type``."""
    names, model_type = f.items("architectures"), f.values.get("model_type")
    by_name = next((_BY_ARCHITECTURE[name] for name in names if name in _BY_ARCHITECTURE), None)
    by_type = _MODEL_TYPES.get(model_type, model_type) if isinstance(model_type, str) else None
    by_type = by_type if by_type in _FAMILIES and model_type not in _MODEL_TYPES.values() else None
    if by_name is None:
        by_name, by_type = import_module(_ENCODERS).named(f, by_type)
    if by_name is not None and by_type not in (None, by_name.removesuffix("_classifier")):
        raise ModelLoadError(
            f"{f.where}: architectures = {names!r} and model_type = {model_type!r} are two kinds of model: correct the "
            "one that is wrong."
        )
    family = by_name or by_type
    if family is None:
        supported = ", ".join((*_BY_ARCHITECTURE, *import_module(_ENCODERS).BY_ARCHITECTURE))
        if not names and model_type is None:
            raise ModelLoadError(
                f"{f.where}: architectures and model_type are missing, so the kind of model is unknown; supported are "
                f"{supported}."
            )
        raise UnsupportedModelError(
            f"{f.where}: architectures = {names!r} with model_type = {model_type!r} is not supported."
            f"{import_module('quire.families.missing').reason(names)} Supported are {supported}."
        )
    return family


def weight_map(spec: ModelSpec) -> WeightMap:
    """Return where a safetensors checkpoint of this model keeps each canonical weight."""
    return _family(spec.family).weights(spec)
