"""The checkpoint that is quantized: its matrices layer by layer, and every other tensor, under their stored names.

Torch-free. A matrix is what the file holds, so a fused ``qkv_proj`` is one matrix of several canonical weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.errors import ConfigError, ModelLoadError
from quire.families.weights import Take
from quire.models.checkpoint import Checkpoint, describe, read_json, stored_sources
from quire.models.safetensors_file import StoredTensor, checkpoint_files, read_safetensors
from quire.models.weight_sources import FLOATS
from quire.weight_plan import role_of


@dataclass(frozen=True, slots=True)
class Matrix:
    """The tensor ``{name}.weight`` ``[out, in]`` of decoder layer ``layer``, which ``parts`` are cut from."""

    name: str
    layer: int
    out_features: int
    in_features: int
    parts: tuple[str, ...]  # canonical names

    @property
    def tensor(self) -> str:
        return f"{self.name}.weight"


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint in 16 or 32 bits. ``tensors``: stored name → where it lies; ``layer_of``: of those in layers.

    ``takes``: canonical name → stored name and what is taken of it, for weights that lie in one tensor.
    ``experts``: canonical name → stored names, where each expert's matrix is a tensor.
    """

    checkpoint: Checkpoint
    config: Mapping[str, object]
    tensors: Mapping[str, StoredTensor]
    matrices: tuple[Matrix, ...]
    layer_of: Mapping[str, int]
    takes: Mapping[str, tuple[str, Take]]
    experts: Mapping[str, tuple[str, ...]]
    remarks: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return self.checkpoint.path

    @property
    def num_layers(self) -> int:
        return self.checkpoint.spec.num_layers

    def layer_tensors(self, layer: int | None) -> list[str]:
        """Return the stored names of one layer; None: of what belongs to no layer."""
        return [name for name in self.tensors if self.layer_of.get(name) == layer]


def read_source(path: Path) -> Source:
    """Describe the checkpoint at ``path``.

    Raises:
        ConfigError: it is quantized already, or no folder of safetensors.
        ModelLoadError: it cannot be read.
    """
    checkpoint, config = _plain_checkpoint(path)
    spec = checkpoint.spec
    tensors, sources = stored_sources(path, spec)
    raw = _stored_names(path)
    parts: dict[str, list[str]] = {}
    layer_of: dict[str, int] = {}
    takes: dict[str, tuple[str, Take]] = {}
    experts: dict[str, tuple[str, ...]] = {}
    num_stacked = 0
    for canonical, source in sources.items():
        layer = int(canonical.split(".", 2)[1]) if canonical.startswith("layers.") else None
        if source.take.stacked:
            experts[canonical] = tuple(raw[_place(tensors[name])] for name in source.take.names)
        elif len(source.take.names) == 1:
            takes[canonical] = raw[_place(tensors[source.take.names[0]])], source.take
        for name in source.take.names:
            if layer is not None:
                layer_of[raw[_place(tensors[name])]] = layer
            if role_of(spec, canonical) != "linear":
                continue
            if len(tensors[name].shape) != 2 or source.take.transpose or not name.endswith(".weight"):
                num_stacked += 1
                continue
            parts.setdefault(name, []).append(canonical)
    matrices = []
    for name, of in parts.items():
        out, in_features = tensors[name].shape
        stored_name = raw[_place(tensors[name])].removesuffix(".weight")
        matrices.append(Matrix(stored_name, int(of[0].split(".", 2)[1]), out, in_features, tuple(of)))
    if not matrices:
        raise ModelLoadError(
            f"{path} has no matrix of a linear that is stored alone, so nothing to quantize."
        )
    stored = {raw[_place(tensor)]: tensor for tensor in tensors.values()}
    for matrix in matrices:
        if stored[matrix.tensor].dtype not in FLOATS:
            raise ConfigError(
                f"{stored[matrix.tensor].file}: {matrix.tensor} is of type {stored[matrix.tensor].dtype}, so it is "
                "quantized already"
            )
    stacked = f"{num_stacked} tensors of several matrices stay as they are"
    lines = (stacked,) if num_stacked else ()
    return Source(
        checkpoint,
        config,
        stored,
        tuple(sorted(matrices, key=lambda m: m.layer)),
        layer_of,
        takes,
        experts,
        lines,
    )


def _plain_checkpoint(path: Path) -> tuple[Checkpoint, Mapping[str, object]]:
    """Return what is at ``path``, and its config. Raises `ConfigError` where it is quantized, or no safetensors."""
    checkpoint = describe(path)
    if checkpoint.kind != "safetensors":
        raise ConfigError(
            f"{path} is not a folder of safetensors: its weights are quantized already, or their source is lost; "
            "quantize the checkpoint in 16 bits that it was made from"
        )
    config = read_json(path / "config.json")
    if config.get("quantization_config"):
        raise ConfigError(
            f"{path / 'config.json'} has a quantization_config: the checkpoint is quantized already; quantize the one "
            "in 16 bits that it was made from"
        )
    return checkpoint, config


def _place(tensor: StoredTensor) -> tuple[Path, int]:
    return tensor.file, tensor.offset


def _stored_names(path: Path) -> dict[tuple[Path, int], str]:
    """Return the name of each tensor as the file has it: readers see the names of a text decoder."""
    names: dict[tuple[Path, int], str] = {}
    for file in checkpoint_files(path):
        for name, tensor in read_safetensors(file).items():
            names[_place(tensor)] = name
    return names
