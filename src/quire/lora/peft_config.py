"""`PeftConfig`: what counts of an ``adapter_config.json`` (huggingface/peft, ``LoraConfig``). Torch-free.

Every field is either used, known to change no answer, or refused where it is set: an adapter that loads "almost"
answers something else than it was trained for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.families.shape import Fields

CONFIG_NAME = "adapter_config.json"
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"  # the modules at the ends of a model
ENDS = (EMBEDDING, HEAD)
_USED = {
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "bias", "init_lora_weights", "use_dora", "modules_to_save",
    "ensure_weight_tying",
}  # fmt: skip
# They say how an adapter was trained, stored or named.
_WITHOUT_EFFECT = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "fan_in_fan_out", "megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config",
    "lora_ga_config", "qalora_group_size", "runtime_config",
}  # fmt: skip
_REFUSED = {
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
    layers: tuple[int, ...] | None  # those of `layers_to_transform`; None: all
    layer_names: tuple[str, ...]  # before the number of a layer; (): any
    saved: tuple[str, ...]  # ends of the names of modules that the file has whole
    dora: bool
    ties: bool  # the two ends are one matrix, and stay one

    def rank_of(self, module: str) -> int:
        return int(_by_pattern(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """alpha / r, or alpha / sqrt(r) (rank-stabilized LoRA, arXiv:2312.03732)."""
        rank, alpha = self.rank_of(module), _by_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def adapts(self, module: str) -> bool:
        """Tell whether PEFT puts LoRA beside ``module``, and the file must have tensors for it. "": what is no LoRA."""
        if not module:
            return True
        if self.ties and module in ENDS:
            return not self.saves(module) and any(self._chooses(end) for end in ENDS)
        return not self.saves(module) and self._chooses(module)

    def saves(self, module: str) -> bool:
        """Tell whether the file has ``module`` whole, in place of the model's (PEFT compares ends of names)."""
        named = ENDS if self.ties and module in ENDS else (module,)
        return any(saved.endswith(name) for saved in named for name in self.saved)

    def _chooses(self, module: str) -> bool:
        if _matches(self.excluded, module):
            return False
        # Embeddings are no linears, and PEFT leaves the output matrix out.
        chosen = module not in ENDS if self.targets == "all-linear" else _matches(self.targets, module)
        return chosen and (self.layers is None or _layer_of(module, self.layer_names) in self.layers)


def read_peft_config(path: Path, values: Mapping[str, Any], *, tied: bool) -> PeftConfig:
    """Check ``values``, the JSON object of the file at ``path``. ``tied``: whether the model's ends are one matrix.

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
        layers=f.integers("layers_to_transform") if f.has("layers_to_transform") else None,
        layer_names=_patterns(f),
        saved=_saved(f),
        dora=f.flag("use_dora", False),
        ties=tied and f.flag("ensure_weight_tying", False),
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


def _saved(f: Fields) -> tuple[str, ...]:
    names = _names(f, "modules_to_save")
    names = (names,) if isinstance(names, str) and names else tuple(names)
    for name in names:
        if not any(end.endswith(name) for end in ENDS):
            raise UnsupportedModelError(
                f"{f.where}: modules_to_save has {name!r}: of modules trained whole only embed_tokens and lm_head are "
                "supported; merge the adapter into the base model."
            )
    return names


def _patterns(f: Fields) -> tuple[str, ...]:
    patterns = _names(f, "layers_pattern")
    patterns = (patterns,) if isinstance(patterns, str) and patterns else tuple(patterns)
    for pattern in patterns:
        _compile(f, "layers_pattern", pattern)
    return patterns


def _layer_of(module: str, names: tuple[str, ...]) -> int | None:
    """Return the number of a module's layer as PEFT finds it: behind one of ``names``, or behind any."""
    for name in names or (r"[^.]*",):
        match = re.match(rf".*\.{name}\.(\d+)\.", module)
        if match is not None:
            return int(match[1])
    return None


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
