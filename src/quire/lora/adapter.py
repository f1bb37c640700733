"""`read_adapter`: a PEFT folder, checked whole against a model before any of it is used. Torch-free.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight    A [rank, in_features]
    └── PEFT's ────┘ └── the linear's name in checkpoints ┘

Names go through the family's own weight map, so a fused ``qkv_proj`` (Phi-3) becomes three parts that share an A, each
with its rows of B.

`read_peft_config` reads ``adapter_config.json`` (huggingface/peft, ``LoraConfig``). Every field is either used, known
to change no answer, or refused where it is set: an adapter that loads "almost" answers something else than it was
trained for.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import ModelLoadError, UnsupportedModelError, nearest
from quire.families import Take, weight_map
from quire.families.shape import Fields
from quire.models.checkpoint import read_json
from quire.models.safetensors_file import StoredTensor, map_file, read_safetensors, reading
from quire.modelspec import ModelSpec
from quire.request import Adapter
from quire.weight_plan import adaptable

WEIGHTS_NAME = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_LOW_RANK = re.compile(r"(?P<module>.+)\.lora_(?P<which>[AB])(\.default)?\.weight")
_OF_LORA = re.compile(r"(?P<module>.+)\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)\b.*")
_OTHER_TENSORS = {
    "lora_embedding_": "adapters of the token embedding are not supported",
    "lora_magnitude_vector": "DoRA is not supported",
    ".modules_to_save.": "whole modules beside the adapter are not supported",
    ".lora_B.bias": "biases of lora_B are not supported",
}
_FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """The adapter of one canonical matrix: ``scale · b[rows] a``."""

    a: StoredTensor  # [rank, in_features]
    b: StoredTensor  # [out_features of the stored linear, rank]
    rows: slice  # of b, that belong to this matrix
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """An adapter on disk that fits the model. ``parts``: "layers.0.attn.q" … → what it adds there."""

    adapter: Adapter
    parts: Mapping[str, AdapterPart]
    remarks: tuple[str, ...] = ()  # tensors that its configuration leaves out


def read_adapter(name: str, folder: Path, spec: ModelSpec) -> AdapterFile:
    """Return the adapter in ``folder``: headers are read and checked, and the bytes hashed for its key.

    Raises `ModelLoadError` for what is missing, damaged or does not fit ``spec``, naming the file and the tensor, and
    `UnsupportedModelError` for what is more than plain LoRA.
    """
    config_path, weights_path = folder / CONFIG_NAME, folder / WEIGHTS_NAME
    if not config_path.is_file():
        raise ModelLoadError(
            f"{folder} has no {CONFIG_NAME}: it is no PEFT adapter. Give the folder that save_pretrained wrote."
        )
    if not weights_path.is_file() and (folder / "adapter_model.bin").is_file():
        raise ModelLoadError(
            f"{folder} has adapter_model.bin and no {WEIGHTS_NAME}; pickles can run code and are not read: save it as "
            "safetensors."
        )
    with reading(folder):
        config = read_peft_config(config_path, read_json(config_path))
        stored = read_safetensors(weights_path)
        left_out = [each for each in stored if not config.adapts(module_of(each))]
        parts = _parts(weights_path, config, {n: t for n, t in stored.items() if n not in left_out}, spec)
        rank = max(part.rank for part in parts.values())
    remarks: tuple[str, ...] = ()
    if left_out:
        some = ", ".join(left_out[:3])
        remarks = (
            f"adapter {name}: {len(left_out)} tensors are of modules that {CONFIG_NAME} leaves out, {some}",
        )
    return AdapterFile(Adapter(name, str(folder), _digest(config_path, weights_path), rank), parts, remarks)


def module_of(tensor: str) -> str:
    """Return the module that a tensor of LoRA belongs to, as PEFT names it; "" for one that is no part of LoRA."""
    found = _OF_LORA.fullmatch(tensor.removeprefix(_PREFIX))
    return "" if found is None else found["module"]


def _digest(*paths: Path) -> str:
    """Return the name of the content: it separates the prefix caches of adapters and shows that a file has changed."""
    digest = hashlib.blake2b(b"quire.adapter.v1", digest_size=16)
    for path in paths:
        content = map_file(path)
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()


def _parts(
    path: Path, config: PeftConfig, stored: Mapping[str, StoredTensor], spec: ModelSpec
) -> dict[str, AdapterPart]:
    modules = _Modules(spec)
    pairs = _pairs(path, stored, modules)
    parts: dict[str, AdapterPart] = {}
    for module, pair in pairs.items():
        if set(pair) != {"A", "B"}:
            have = next(iter(pair))
            raise ModelLoadError(
                f"{path}: {module} has lora_{have} and no lora_{'B' if have == 'A' else 'A'}."
            )
        (a_name, a), (b_name, b) = pair["A"], pair["B"]
        out_features, in_features = modules.shapes[module]
        rank = config.rank_of(module)
        _check(path, a_name, a, (rank, in_features), f"rank {rank} and {in_features} inputs of {module}")
        _check(path, b_name, b, (out_features, rank), f"{out_features} outputs of {module} and rank {rank}")
        for canonical, take in modules.takes[module]:
            rows = slice(take.start, take.stop, take.step)
            parts[canonical] = AdapterPart(a, b, rows, config.scale_of(module))
    missing = [module for module in modules.takes if module not in pairs and config.adapts(module)]
    if missing:
        raise ModelLoadError(
            f"{path}: {_PREFIX}{missing[0]}.lora_A.weight is missing, and target_modules of {CONFIG_NAME} names it; "
            "the file is incomplete, or the adapter was trained on another model."
        )
    if not parts:
        raise ModelLoadError(f"{path} holds no tensors for the target_modules of {CONFIG_NAME}.")
    return parts


def _pairs(
    path: Path, stored: Mapping[str, StoredTensor], modules: _Modules
) -> dict[str, dict[str, tuple[str, StoredTensor]]]:
    """Return linear → "A" and "B" → (name in the file, tensor)."""
    pairs: dict[str, dict[str, tuple[str, StoredTensor]]] = {}
    for name, tensor in stored.items():
        for mark, why in _OTHER_TENSORS.items():
            if mark in name:
                raise UnsupportedModelError(f"{path}: {name}: {why}.")
        match = _LOW_RANK.fullmatch(name.removeprefix(_PREFIX))
        if match is None:
            raise UnsupportedModelError(
                f"{path}: {name} is no lora_A or lora_B: trained modules beside an adapter are not supported."
            )
        module = modules.find(path, name, match["module"])
        pairs.setdefault(module, {})[match["which"]] = (name, tensor)
    return pairs


def _check(path: Path, name: str, stored: StoredTensor, shape: tuple[int, int], meaning: str) -> None:
    if stored.shape != shape:
        raise ModelLoadError(
            f"{path}: {name} has shape {list(stored.shape)}, and {meaning} ask for {list(shape)}; the adapter was "
            "trained on another model, or its configuration is another's."
        )
    if stored.dtype not in _FLOATS:
        raise ModelLoadError(f"{path}: {name} is of type {stored.dtype}; allowed are {', '.join(_FLOATS)}.")


class _Modules:
    """The linears of a model by their names in checkpoints, which are those that PEFT writes."""

    def __init__(self, spec: ModelSpec) -> None:
        self.takes: dict[str, list[tuple[str, Take]]] = {}  # linear → its matrices here
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._others: set[str] = set()
        allowed = adaptable(spec)
        for canonical, takes in weight_map(spec).sources.items():
            matrix, take = canonical.removesuffix(".weight"), takes[0]
            if matrix in allowed and len(take.names) == 1 and take.dim == 0 and not take.transpose:
                module = take.names[0].removesuffix(".weight")
                self.takes.setdefault(module, []).append((matrix, take))
                self.shapes[module] = take.shape
            else:
                self._others.update(name.removesuffix(".weight") for each in takes for name in each.names)
        self._others.add("lm_head")

    def find(self, path: Path, tensor: str, module: str) -> str:
        """Return the linear that a tensor's ``module`` names; of a bare decoder it has no "model." prefix."""
        for name in (module, f"model.{module}"):
            if name in self.takes:
                return name
        if module in self._others or f"model.{module}" in self._others or ".experts." in module:
            raise UnsupportedModelError(
                f"{path}: {tensor}: an adapter of {module} is not supported; those of attention, dense MLPs and shared "
                "experts are."
            )
        raise ModelLoadError(
            f"{path}: {tensor}: this model has no linear {module!r}{nearest(module, self.takes)}; the adapter was "
            "trained on another model."
        )


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
    layers: tuple[int, ...] | None  # those of `layers_to_transform`; None: all
    layer_names: tuple[str, ...]  # before the number of a layer; (): any

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
        if _matches(self.excluded, module):
            return False
        chosen = module != "lm_head" if self.targets == "all-linear" else _matches(self.targets, module)
        return chosen and (self.layers is None or _layer_of(module, self.layer_names) in self.layers)


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
        layers=f.integers("layers_to_transform") if f.has("layers_to_transform") else None,
        layer_names=_patterns(f),
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


def _patterns(f: Fields) -> tuple[str, ...]:
    found = _names(f, "layers_pattern")
    found = (found,) if isinstance(found, str) and found else tuple(found)
    for pattern in found:
        _compile(f, "layers_pattern", pattern)
    return found


def _layer_of(module: str, names: tuple[str, ...]) -> int | None:
    """Return the number of a module's layer as PEFT finds it: behind one of ``names``, or behind any."""
    for name in names or (r"[^.]*",):
        found = re.match(rf".*\.{name}\.(\d+)\.", module)
        if found is not None:
            return int(found[1])
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
