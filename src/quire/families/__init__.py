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
    names = f.items("architectures")
    if not names or not isinstance(names[0], str):
        raise ModelLoadError(
            f"{where}: architectures is missing or not a list of names, so the kind of model is unknown; "
            f"supported are {', '.join(SUPPORTED)}."
        )
    family = next((item for item in _FAMILIES if item.architecture == names[0]), None)
    if family is None:
        raise UnsupportedModelError(
            f"{where}: architecture {names[0]!r} is not supported; supported are {', '.join(SUPPORTED)}."
        )
    for part in _OTHER_PARTS:
        if f.has(part):
            raise UnsupportedModelError(
                f"{where}: {names[0]} with {part} is not supported: Quire runs text decoders, "
                f"as they are in {', '.join(SUPPORTED)}."
            )
    quantization = f.nested("quantization_config")
    if quantization is not None and quantization.values.get("quant_method") not in family.quantizations:
        read_quantization(f, others=family.quantizations)
    return family.read(f)


def quantization_of(config: Mapping[str, Any], where: str = "config.json") -> Quantization | None:
    """Return how the linears of a checkpoint are quantized; None: they are not, or the family's weight map knows."""
    f = Fields(config, where)
    names = f.items("architectures")
    family = next((item for item in _FAMILIES if names and item.architecture == names[0]), None)
    return read_quantization(f, others=family.quantizations if family else ())


def weight_map(spec: ModelSpec) -> WeightMap:
    """Return where a safetensors checkpoint of this model keeps each canonical weight."""
    return next(item for item in _FAMILIES if item.name == spec.family).weights(spec)
