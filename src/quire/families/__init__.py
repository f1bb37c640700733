"""Families of models: ``config.json`` → `ModelSpec`, and where their checkpoints keep each weight. Strings only.

A family is in `SUPPORTED` only with a parity test against transformers (``tests/parity``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.families import deepseek, gemma, gpt_oss, llama, qwen
from quire.families.quantization import Quantization, read_quantization
from quire.families.shape import Fields
from quire.families.weights import Family, Take, WeightMap
from quire.modelspec import ModelSpec

__all__ = ["SUPPORTED", "Family", "Take", "WeightMap", "quantization_of", "spec_from_config", "weight_map"]

_FAMILIES: tuple[Family, ...] = (
    llama.LLAMA, llama.MISTRAL, qwen.QWEN2, qwen.QWEN3, gemma.GEMMA2, gemma.GEMMA3, llama.PHI3, llama.OLMO2,
    llama.GRANITE, llama.SMOLLM3, llama.MIXTRAL, qwen.QWEN2_MOE, qwen.QWEN3_MOE, gpt_oss.FAMILY, deepseek.DEEPSEEK_V2,
    deepseek.DEEPSEEK_V3,
)  # fmt: skip

# Names as in "architectures" of config.json.
SUPPORTED: tuple[str, ...] = tuple(family.architecture for family in _FAMILIES)

# Parts of a configuration that mean more than a text decoder.
_OTHER_PARTS = ("vision_config", "audio_config", "encoder", "text_config")


def spec_from_config(config: Mapping[str, Any], where: str = "config.json") -> ModelSpec:
    """Return the `ModelSpec` of a ``config.json``; ``where`` is what errors call the file.

    Raises `UnsupportedModelError` for an architecture or feature that Quire does not run, with its name and what
    is supported, and `ModelLoadError` for a missing or wrong value, with its key.
    """
    f = Fields(config, where)
    family = _family_of(f)
    f = Fields({**config, "architectures": [family.architecture]}, where)
    for part in _OTHER_PARTS:
        if f.has(part):
            raise UnsupportedModelError(
                f"{where}: {family.architecture} with {part} is not supported: Quire runs text decoders, "
                f"as they are in {', '.join(SUPPORTED)}."
            )
    f.refuse("is_causal", unless=(True,), why="decoders attend to the past only")
    f.refuse("use_bidirectional_attention", unless=(False,), why="decoders attend to the past only")
    quantization = f.nested("quantization_config")
    if quantization is not None and quantization.values.get("quant_method") not in family.quantizations:
        read_quantization(f, others=family.quantizations)
    return family.read(f)


def quantization_of(config: Mapping[str, Any], where: str = "config.json") -> Quantization | None:
    """Return how the linears of a checkpoint are quantized; None: they are not, or the family's weight map knows."""
    f = Fields(config, where)
    return read_quantization(f, others=_family_of(f).quantizations)


def _family_of(f: Fields) -> Family:
    """Return the family of the first name in ``architectures`` that is known, else of ``model_type``."""
    names, model_type = f.items("architectures"), f.values.get("model_type")
    by_name = next((each for name in names for each in _FAMILIES if each.architecture == name), None)
    by_type = next((each for each in _FAMILIES if (each.model_type or each.name) == model_type), None)
    if by_name is not None and by_type not in (None, by_name):
        raise ModelLoadError(
            f"{f.where}: architectures = {names!r} and model_type = {model_type!r} are two kinds of model: correct the "
            "one that is wrong."
        )
    family = by_name or by_type
    if family is None and not names and model_type is None:
        raise ModelLoadError(
            f"{f.where}: architectures and model_type are missing, so the kind of model is unknown; supported are "
            f"{', '.join(SUPPORTED)}."
        )
    if family is None:
        raise UnsupportedModelError(
            f"{f.where}: architectures = {names!r} with model_type = {model_type!r} is not supported; supported are "
            f"{', '.join(SUPPORTED)}."
        )
    return family


def weight_map(spec: ModelSpec) -> WeightMap:
    """Return where a safetensors checkpoint of this model keeps each canonical weight."""
    return next(item for item in _FAMILIES if item.name == spec.family).weights(spec)
