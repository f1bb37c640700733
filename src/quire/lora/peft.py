"""PEFT's ``adapter_config.json``: what is refused by name, and the rank and scale of every module. Torch-free.

Source: huggingface/peft, ``LoraConfig``. Every field is either used, known to change no answer, or refused where it is
set: an adapter that loads "almost" answers something else than it was trained for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.families.fields import Fields

CONFIG_NAME = "adapter_config.json"
_USED = {
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "bias", "init_lora_weights",
}  # fmt: skip
# They say how an adapter was trained, stored or named.
_WITHOUT_EFFECT = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "fan_in_fan_out", "megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config",
    "lora_ga_config", "qalora_group_size", "runtime_config", "ensure_weight_tying",
}  # fmt: skip
_REFUSED = {
    "use_dora": "DoRA scales every output feature of the base weight; only plain LoRA is supported",
    "modules_to_save": "whole modules trained beside the adapter are not supported: merge the adapter into the base "
    "model",
    "trainable_token_indices": "trained token embeddings are not supported",
    "target_parameters": "adapters of bare parameters (experts) are not supported",
    "layer_replication": "repeated layers are not supported",
    "lora_bias": "biases of lora_B are not supported",
    "use_qalora": "QA-LoRA pools the inputs; only plain LoRA is supported",
    "alora_invocation_tokens": "activated LoRA begins in the middle of a prompt; only plain LoRA is supported",
    "arrow_config": "Arrow routes between adapters; only plain LoRA is supported",
}
# Other ways of starting change the base weights too, so the adapter fits only a base changed alike.
_INITS = (True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """What counts of an ``adapter_config.json``."""

    where: str
    rank: int
    alpha: float
    rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    targets: tuple[str, ...] | str  # names or ends of names; one text: "all-linear" or a regular expression
    excluded: tuple[str, ...] | str
    complete: bool  # every module that matches `targets` is adapted

    def rank_of(self, module: str) -> int:
        return int(_by_pattern(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """alpha / r, or alpha / sqrt(r) (rank-stabilized LoRA, arXiv:2312.03732)."""
        rank, alpha = self.rank_of(module), _by_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def expects(self, module: str) -> bool:
        """Tell whether the file must have tensors for ``module``."""
        if not self.complete or _matches(self.excluded, module):
            return False
        return self.targets == "all-linear" or _matches(self.targets, module)


def read_peft_config(path: Path, values: Mapping[str, Any]) -> PeftConfig:
    """Check ``values``, the JSON object of the file at ``path``.

    Raises `UnsupportedModelError` for what would need more than plain LoRA, naming the field, and `ModelLoadError` for
    a value that makes no sense.
    """
    f = Fields(values, str(path))
    if values.get("peft_type") != "LORA":
        kind = values.get("peft_type")
        raise UnsupportedModelError(f"{path}: peft_type = {kind!r} is not supported: only 'LORA' is.")
    for key, why in _REFUSED.items():
        if values.get(key):
            raise UnsupportedModelError(f"{path}: {key} = {values[key]!r}: {why}.")
    if values.get("bias", "none") != "none":
        raise UnsupportedModelError(
            f"{path}: bias = {values['bias']!r}: trained biases of the base model are not supported, only 'none'."
        )
    if values.get("init_lora_weights", True) not in _INITS:
        raise UnsupportedModelError(
            f"{path}: init_lora_weights = {values['init_lora_weights']!r} changed the base weights too; convert the "
            "adapter to plain LoRA (PEFT: save_pretrained with path_initial_model_for_weight_conversion)."
        )
    known = _USED | _WITHOUT_EFFECT | set(_REFUSED)
    unknown = sorted(key for key, value in values.items() if value and key not in known)
    if unknown:
        raise UnsupportedModelError(
            f"{path}: {unknown[0]} = {values[unknown[0]]!r} is not known here and may change what the adapter computes."
        )
    targets = _names(f, "target_modules")
    if not targets:
        raise ModelLoadError(f"{path}: target_modules is missing or empty, so the adapter changes nothing.")
    return PeftConfig(
        where=str(path),
        rank=f.integer("r", minimum=1),
        alpha=f.number("lora_alpha"),
        rslora=f.flag("use_rslora", False),
        rank_pattern=_numbers(f, "rank_pattern"),
        alpha_pattern=_numbers(f, "alpha_pattern"),
        targets=targets,
        excluded=_names(f, "exclude_modules"),
        complete=values.get("layers_to_transform") is None,
    )


def _names(f: Fields, key: str) -> tuple[str, ...] | str:
    value = f.values.get(key)
    if value is None or isinstance(value, str):
        text = value or ""
        if text and text != "all-linear":
            _compile(f, key, text)
        return text
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise f.wrong(key, "a list of module names, or one text")
    return tuple(value)


def _numbers(f: Fields, key: str) -> dict[str, Any]:
    value = f.values.get(key) or {}
    if not isinstance(value, dict):
        raise f.wrong(key, "an object of module name → number")
    for pattern, number in value.items():
        _compile(f, key, pattern)
        wanted = isinstance(number, int) if key == "rank_pattern" else isinstance(number, int | float)
        if not wanted or isinstance(number, bool) or number <= 0:
            raise f.wrong(key, "an object of module name → number above 0")
    return value


def _compile(f: Fields, key: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ModelLoadError(
            f"{f.where}: {key} has {pattern!r}, which is no regular expression: {error}."
        ) from None


def _by_pattern(patterns: Mapping[str, Any], module: str, default: float) -> float:
    """PEFT's rule: the first pattern that the end of the name matches."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return float(value)
    return default


def _matches(names: tuple[str, ...] | str, module: str) -> bool:
    if isinstance(names, str):
        return bool(names) and re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)
