"""`read_adapter`: a PEFT folder, checked whole against a model before any of it is used. Torch-free.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight    A [rank, in_features]
    └── PEFT's ────┘ └── the linear's name in checkpoints ┘

Names go through the family's own weight map, so a fused ``qkv_proj`` (Phi-3) becomes three parts that share an A, each
with its rows of B. The embedding counts as a linear from ids to rows: its A, ``lora_embedding_A``, has a column per id.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.errors import ModelLoadError, UnsupportedModelError, nearest
from quire.families import Take, weight_map
from quire.lora.peft_config import CONFIG_NAME, EMBEDDING, ENDS, HEAD, PeftConfig, read_peft_config
from quire.models.checkpoint import read_json
from quire.models.safetensors_file import StoredTensor, map_file, read_safetensors, reading
from quire.modelspec import ModelSpec
from quire.request import Adapter
from quire.weight_plan import adaptable, end_matrices

WEIGHTS_NAME = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_OF_LORA = re.compile(r"(?P<module>.+)\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)\b.*")
# What a tensor is to its module; "copy": of the model's own weight, which PEFT saves beside LoRA of an end.
_KINDS = {
    "A": re.compile(r"(.+)\.lora_A(?:\.default)?\.weight"),
    "B": re.compile(r"(.+)\.lora_B(?:\.default)?\.weight"),
    "embedding_A": re.compile(r"(.+)\.lora_embedding_A(?:\.default)?"),
    "embedding_B": re.compile(r"(.+)\.lora_embedding_B(?:\.default)?"),
    "magnitude_vector": re.compile(r"(.+)\.lora_magnitude_vector(?:\.default)?(?:\.weight)?"),
    "copy": re.compile(r"(.+)\.base_layer\.weight"),
    "whole": re.compile(r"(.+?)(?:\.modules_to_save(?:\.default)?)?\.weight"),
}
_OTHER_TENSORS = {".lora_B.bias": "biases of lora_B are not supported"}
_FLOATS = ("float32", "float16", "bfloat16")
_CANONICAL = {EMBEDDING: "embed_tokens", HEAD: "lm_head"}


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """The adapter of one canonical matrix: ``scale · b[rows] a``. With a ``magnitude`` it is a DoRA."""

    a: StoredTensor  # [rank, in_features]
    b: StoredTensor  # [out_features of the stored linear, rank]
    # Rows of b and of the magnitude that belong to this matrix.
    rows: tuple[range, ...]
    scale: float
    magnitude: StoredTensor | None = None  # [out_features of the stored linear]

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """An adapter on disk that fits the model.

    ``parts``: "layers.0.attn.q", "embed_tokens", "lm_head" … → what it adds there. Of the last two, ``saved`` has the
    matrices to use in place of the model's, and ``copies`` those that must be the model's own (`base_copies`).
    """

    adapter: Adapter
    parts: Mapping[str, AdapterPart]
    saved: Mapping[str, StoredTensor]
    copies: Mapping[str, StoredTensor]
    remarks: tuple[str, ...] = ()  # tensors that its configuration leaves out


def read_adapter(name: str, folder: Path, spec: ModelSpec) -> AdapterFile:
    """Return the adapter in ``folder``: headers are read and checked, and the bytes hashed for its key.

    Raises `ModelLoadError` for what is missing, damaged or does not fit ``spec``, naming the file and the tensor, and
    `UnsupportedModelError` for what Quire does not compute.
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
        config = read_peft_config(config_path, read_json(config_path), tied=spec.tie_word_embeddings)
        stored = read_safetensors(weights_path)
        left_out = [key for key in stored if not config.adapts(module_of(key))]
        reader = _Reader(weights_path, config, _Modules(spec))
        for tensor, where in stored.items():
            if tensor not in left_out:
                reader.take(tensor, where)
        parts = reader.parts()
        saved = reader.saved()
        rank = max(part.rank for part in parts.values())
    remarks: tuple[str, ...] = ()
    if left_out:
        some = ", ".join(left_out[:3])
        remarks = (
            f"adapter {name}: {len(left_out)} tensors are of modules that {CONFIG_NAME} leaves out, {some}",
        )
    adapter = Adapter(name, str(folder), _digest(config_path, weights_path), rank, tuple(sorted(saved)))
    return AdapterFile(adapter, parts, saved, reader.copies, remarks)


def module_of(tensor: str) -> str:
    """Return the module that a tensor of LoRA belongs to, as PEFT names it; "" for one that is no part of LoRA."""
    match = _OF_LORA.fullmatch(tensor.removeprefix(_PREFIX))
    return "" if match is None else match["module"]


def _digest(*paths: Path) -> str:
    """Return the name of the content: it separates the prefix caches of adapters and shows that a file has changed."""
    digest = hashlib.blake2b(b"quire.adapter.v1", digest_size=16)
    for path in paths:
        content = map_file(path)
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()


_Named = tuple[str, StoredTensor]  # with its name in the file


class _Reader:
    """Sorts the tensors of a file by module, and checks that each module has what it needs."""

    def __init__(self, path: Path, config: PeftConfig, modules: _Modules) -> None:
        self._path, self._config, self._modules = path, config, modules
        self._low: dict[str, dict[str, _Named]] = {}  # module → kind → tensor
        self._whole: dict[str, StoredTensor] = {}  # "embed_tokens", "lm_head"
        self.copies: dict[str, StoredTensor] = {}

    def take(self, name: str, stored: StoredTensor) -> None:
        """Take one tensor that the configuration does not leave out."""
        for mark, why in _OTHER_TENSORS.items():
            if mark in name:
                raise UnsupportedModelError(f"{self._path}: {name}: {why}.")
        text = name.removeprefix(_PREFIX)
        kind, module = next(
            ((kind, match[1]) for kind, form in _KINDS.items() if (match := form.fullmatch(text))), ("", "")
        )
        if kind in ("copy", "whole"):
            self._take_matrix(kind, name, stored, module)
            return
        if not kind:
            raise UnsupportedModelError(
                f"{self._path}: {name} is no part of LoRA, and Quire does not know what it changes."
            )
        module = self._modules.find(self._path, name, module)
        if kind.startswith("embedding_") != (module == EMBEDDING) and kind != "magnitude_vector":
            raise ModelLoadError(
                f"{self._path}: {name}: {EMBEDDING} has lora_embedding_A and lora_embedding_B, linears have lora_A and "
                "lora_B."
            )
        self._low.setdefault(module, {})[kind.removeprefix("embedding_")] = (name, stored)

    def _take_matrix(self, kind: str, name: str, stored: StoredTensor, module: str) -> None:
        module = module if module in ENDS else f"model.{module}"
        if module not in ENDS:
            raise UnsupportedModelError(
                f"{self._path}: {name} is no part of LoRA: of modules trained whole only embed_tokens and lm_head are "
                "supported; merge the adapter into the base model."
            )
        out, into = self._modules.shapes[module]
        shape = (out, into) if module == HEAD else (into, out)
        _check_vocab(self._path, name, stored, 0, shape[0])
        _check(self._path, name, stored, shape, f"the model's {shape[0]} ids and {shape[1]} numbers per row")
        of = self._whole if kind == "whole" and self._config.saves(module) else self.copies
        of[_CANONICAL[module]] = stored

    def parts(self) -> dict[str, AdapterPart]:
        """Return what the file adds to each canonical matrix."""
        parts: dict[str, AdapterPart] = {}
        for module, tensors in self._low.items():
            parts.update(self._parts_of(module, tensors))
        takes = self._modules.takes
        missing = [module for module in takes if module not in self._low and self._config.adapts(module)]
        if missing:
            prefix = "lora_embedding_A" if missing[0] == EMBEDDING else "lora_A.weight"
            raise ModelLoadError(
                f"{self._path}: {_PREFIX}{missing[0]}.{prefix} is missing, and target_modules of {CONFIG_NAME} names "
                "it; the file is incomplete, or the adapter was trained on another model."
            )
        if not parts:
            raise ModelLoadError(f"{self._path} holds no tensors for the target_modules of {CONFIG_NAME}.")
        return parts

    def saved(self) -> dict[str, StoredTensor]:
        """Return the matrices that the file has in place of the model's."""
        for module in ENDS:
            if self._config.saves(module) and _CANONICAL[module] not in self._whole:
                raise ModelLoadError(
                    f"{self._path}: {_PREFIX}{module}.weight is missing, and modules_to_save of {CONFIG_NAME} names "
                    "it; the file is incomplete."
                )
        return self._whole

    def _parts_of(self, module: str, tensors: Mapping[str, _Named]) -> dict[str, AdapterPart]:
        path, marks = self._path, "embedding_" if module == EMBEDDING else ""
        for which, other in (("A", "B"), ("B", "A")):
            if which not in tensors:
                raise ModelLoadError(
                    f"{path}: {module} has lora_{marks}{other} and no lora_{marks}{which}."
                    if other in tensors
                    else f"{path}: {module} has a lora_magnitude_vector and no lora_{marks}A."
                )
        (a_name, a), (b_name, b) = tensors["A"], tensors["B"]
        out, into = self._modules.shapes[module]
        rank, magnitude = self._config.rank_of(module), tensors.get("magnitude_vector")
        if module == EMBEDDING:
            _check_vocab(path, a_name, a, 1, into)
        elif module == HEAD:
            _check_vocab(path, b_name, b, 0, out)
        _check(path, a_name, a, (rank, into), f"rank {rank} and {into} inputs of {module}")
        _check(path, b_name, b, (out, rank), f"{out} outputs of {module} and rank {rank}")
        if (magnitude is not None) != self._config.dora:
            has = "is missing" if magnitude is None else "is there"
            raise ModelLoadError(
                f"{path}: {_PREFIX}{module}.lora_magnitude_vector {has}, and use_dora of {CONFIG_NAME} is "
                f"{str(self._config.dora).lower()}."
            )
        if magnitude is not None:
            _check(path, *magnitude, (out,), f"{out} outputs of {module}")
        scale, stored = self._config.scale_of(module), None if magnitude is None else magnitude[1]
        return {
            canonical: AdapterPart(a, b, _rows(take), scale, stored)
            for canonical, take in self._modules.takes[module]
        }


def _rows(take: Take) -> tuple[range, ...]:
    """Return the rows of the stored linear that ``take`` reads, in its order."""
    return take.pieces or (range(take.shape[0])[take.start : take.stop : take.step],)


def _check(path: Path, name: str, stored: StoredTensor, shape: tuple[int, ...], meaning: str) -> None:
    if stored.shape != shape:
        raise ModelLoadError(
            f"{path}: {name} has shape {list(stored.shape)}, and {meaning} ask for {list(shape)}; the adapter was "
            "trained on another model, or its configuration is another's."
        )
    if stored.dtype not in _FLOATS:
        raise ModelLoadError(f"{path}: {name} is of type {stored.dtype}; allowed are {', '.join(_FLOATS)}.")


def _check_vocab(path: Path, name: str, stored: StoredTensor, dim: int, vocab_size: int) -> None:
    if len(stored.shape) == 2 and stored.shape[dim] > vocab_size:
        raise UnsupportedModelError(
            f"{path}: {name} has {stored.shape[dim]} ids and the model {vocab_size}: adapters that add tokens are not "
            "supported; merge the adapter into a model with as many ids."
        )


class _Modules:
    """The modules of a model that LoRA may change by their names in checkpoints, which are those that PEFT writes."""

    def __init__(self, spec: ModelSpec) -> None:
        self.takes: dict[str, list[tuple[str, Take]]] = {}  # module → its matrices here
        self.shapes: dict[str, tuple[int, ...]] = {}  # [out_features, in_features]
        self._others: set[str] = set()
        allowed = adaptable(spec)
        for canonical, takes in weight_map(spec).sources.items():
            matrix, take = canonical.removesuffix(".weight"), takes[0]
            if matrix in allowed and len(take.names) == 1 and take.dim == 0 and not take.transpose:
                module = take.names[0].removesuffix(".weight")
                self.takes.setdefault(module, []).append((matrix, take))
                self.shapes[module] = take.shape
            else:
                self._others.update(name.removesuffix(".weight") for take in takes for name in take.names)
        for module in [module for module in self.takes if not self._are_whole(module)]:
            self._others.add(module)
            del self.takes[module]
        for module, canonical in _CANONICAL.items():
            self.shapes[module] = end_matrices(spec)[canonical]
            self.takes[module] = [(canonical, Take((), self.shapes[module]))]

    def _are_whole(self, module: str) -> bool:
        """Whether an adapter of ``module`` changes nothing but matrices that have adapters here."""
        is_read = bytearray(self.shapes[module][0])
        for rows in (rows for _, take in self.takes[module] for rows in _rows(take)):
            is_read[rows.start : rows.stop : rows.step] = b"\1" * len(rows)
        return all(is_read)

    def find(self, path: Path, tensor: str, module: str) -> str:
        """Return the module that a tensor's ``module`` names; of a bare decoder it has no "model." prefix."""
        for name in (module, f"model.{module}"):
            if name in self.takes:
                return name
        if module in self._others or f"model.{module}" in self._others or ".experts." in module:
            raise UnsupportedModelError(
                f"{path}: {tensor}: an adapter of {module} is not supported; those of attention, dense MLPs, shared "
                "experts, embed_tokens and lm_head are."
            )
        raise ModelLoadError(
            f"{path}: {tensor}: this model has no linear {module!r}{nearest(module, self.takes)}; the adapter was "
            "trained on another model."
        )
