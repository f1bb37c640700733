"""`describe`: what a model on disk is, without reading its weights and without torch.

`read_spec` reads the configuration alone: no weights are downloaded or opened.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from quire.cost.presets import preset_of, preset_spec
from quire.errors import ModelLoadError
from quire.families import quantization_of, spec_from_config, weight_map
from quire.models.generation_config import GenerationDefaults, read_generation
from quire.models.hub import INSTEAD, NAMES, download_config, locate
from quire.models.safetensors_file import AGAIN, StoredTensor, checkpoint_files, read_checkpoint, reading
from quire.models.weight_sources import FLOATS, Source, find_sources, rounded_again, stored_formats, unused
from quire.modelspec import ModelSpec
from quire.weight_format import WeightFormat

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer

Kind = Literal["safetensors", "gguf", "random"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk. ``spec.eos_token_ids`` has the ids of generation_config.json first, then config.json's."""

    path: Path  # the folder, or the GGUF file (of a split one any part)
    kind: Kind
    spec: ModelSpec
    files: tuple[Path, ...]  # weight files; empty for "random"
    dtype: str  # the type of most of the weights' bytes
    generation: GenerationDefaults
    tokenizer: Path  # folder with the tokenizer's files, or the GGUF file
    # Canonical name of a quantized weight → the format that holds it.
    formats: Mapping[str, WeightFormat] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()  # contents of the files that no answer uses

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight files."""
        return sum(path.stat().st_size for path in self.files)


def describe(path: Path, load_format: str = "auto") -> Checkpoint:
    """Return what is at ``path``: a folder with config.json, a GGUF file (or a part of it), or a folder with one.

    Raises `ModelLoadError` with what is wrong and what to do, `UnsupportedModelError` for a model that Quire does not
    run. Headers of the weight files are read, so a truncated file is found here.
    """
    with reading(path):
        return _describe(path, load_format)


def _describe(path: Path, load_format: str) -> Checkpoint:
    if path.is_dir() and load_format in ("auto", "gguf") and not (path / "config.json").is_file():
        return _describe_gguf(path, load_format)
    if path.is_file() or (path.suffix == ".gguf" and not path.is_dir()):
        if load_format == "safetensors":
            raise ModelLoadError(
                f"{path} is one file; load_format = 'safetensors' needs the folder of a model."
            )
        return _describe_gguf(path, load_format)
    if load_format == "gguf" and path.is_dir():
        return _describe_gguf(path, load_format)
    return _describe_folder(path, load_format)


def spec_of(model: str) -> ModelSpec:
    """Return the `ModelSpec` of a preset of the planner, or of what `read_spec` finds."""
    name = preset_of(model) if not Path(model).expanduser().exists() else None
    return preset_spec(name) if name is not None else read_spec(model)


def read_spec(name: str, *, revision: str | None = None) -> ModelSpec:
    """Return the `ModelSpec` of "quill", a folder, a GGUF file, a config.json, or a hub id (that file is fetched).

    Raises:
        ModelLoadError: there is no such thing, or its configuration cannot be read.
        UnsupportedModelError: Quire does not run it.
    """
    path = Path(name).expanduser()
    if name in NAMES or path.exists():
        path = locate(name)
        config = path if path.suffix == ".json" else path / "config.json"
        return spec_from_config(read_json(config), str(config)) if config.is_file() else describe(path).spec
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or name.endswith((".gguf", ".json")):
        raise ModelLoadError(
            f"there is no preset, file or folder {name!r}, and a hub id is org/repo. {INSTEAD}."
        )
    return spec_from_config(read_json(download_config(name, revision)), f"{name}/config.json")


def _describe_folder(path: Path, load_format: str) -> Checkpoint:
    config_path = path / "config.json"
    if not config_path.is_file():
        raise ModelLoadError(f"{path} has no config.json: it is no model folder; download the whole model.")
    config = read_json(config_path)
    spec = spec_from_config(config, str(config_path))
    names = config.get("architectures") or [""]
    classifies = isinstance(names[0], str) and names[0].endswith("ForSequenceClassification")
    if spec.encoder is not None or classifies or (path / "modules.json").is_file():
        spec = import_module("quire.models.sentence_transformers").with_sentence(path, spec)
    seen: tuple[str, ...] = ()  # how the names of the encoder's tensors begin
    if spec.vision is not None:
        spec, seen = import_module("quire.models.vision_config").with_preprocessing(spec, path)
    files: tuple[Path, ...] = ()
    formats: Mapping[str, WeightFormat] = {}
    dtype = spec.dtype
    remarks: tuple[str, ...] = ()
    if load_format != "random":
        files = checkpoint_files(path)
        stored = read_checkpoint(path)
        dtype = _common_dtype(stored.values())
        if spec.sentence is not None and spec.encoder is None and "lm_head.weight" not in stored:
            spec = replace(spec, tie_word_embeddings=True)  # vectors need no output matrix
        spec, of_head = _own_head(spec, stored)
        remarks = (*unused(stored, seen), *of_head)
        quantization = quantization_of(config, str(config_path))
        # MXFP4 is in the map of weights itself.
        if quantization is not None or config.get("quantization_config"):
            sources = find_sources(str(path), weight_map(spec), stored, quantization)
            formats, remarks = stored_formats(spec, sources), (*remarks, *rounded_again(sources))
    generation, eos, left_out = _generation(path)
    spec = replace(spec, dtype=dtype, eos_token_ids=tuple(dict.fromkeys((*eos, *spec.eos_token_ids))))
    kind: Kind = "random" if load_format == "random" else "safetensors"
    return Checkpoint(path, kind, spec, files, dtype, generation, path, formats, (*remarks, *left_out))


def _own_head(spec: ModelSpec, stored: Mapping[str, StoredTensor]) -> tuple[ModelSpec, tuple[str, ...]]:
    """Return ``spec``, untied and with a line where the file has an output matrix that differs from the embedding."""
    head = stored.get("lm_head.weight") if spec.tie_word_embeddings else None
    tables = weight_map(spec).sources["embed.weight"] if head is not None else ()
    table = next((stored[take.names[0]] for take in tables if take.names[0] in stored), None)
    if head is None or table is None or head.equals(table):
        return spec, ()
    line = "lm_head.weight differs from the embedding, so it is used, though tie_word_embeddings says that both are one"
    return replace(spec, tie_word_embeddings=False), (line,)


def _generation(folder: Path) -> tuple[GenerationDefaults, tuple[int, ...], tuple[str, ...]]:
    path = folder / "generation_config.json"
    return read_generation(read_json(path) if path.is_file() else {}, path.name)


def _describe_gguf(path: Path, load_format: str) -> Checkpoint:
    from quire.models.gguf_model import only_model, read_gguf_model

    is_random = load_format == "random"
    model = read_gguf_model(only_model(path) if path.is_dir() else path, weights=not is_random)
    return Checkpoint(
        model.path, "random" if is_random else "gguf", model.spec, () if is_random else model.files, model.dtype,
        GenerationDefaults(), model.path, model.formats, model.remarks,
    )  # fmt: skip


def stored_sources(path: Path, spec: ModelSpec) -> tuple[Mapping[str, StoredTensor], Mapping[str, Source]]:
    """Return every tensor of the folder or GGUF file at ``path``, and where each weight of ``spec`` comes from.

    Raises the errors of `find_sources` where names, shapes or types do not fit ``spec``.
    """
    if path.is_dir():
        config, tensors = path / "config.json", read_checkpoint(path)
        quantization = quantization_of(read_json(config), str(config))
        return tensors, find_sources(str(path), weight_map(spec), tensors, quantization)
    from quire.models.gguf_model import gguf_sources

    return gguf_sources(path, spec)


def _common_dtype(tensors: Iterable[StoredTensor]) -> str:
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.dtype not in FLOATS:  # packed: not a type to compute in
            continue
        sizes[tensor.dtype] += tensor.num_bytes
    return sizes.most_common(1)[0][0] if sizes else "bfloat16"


def read_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer at `Checkpoint.tokenizer`. Raises `ModelLoadError` where there is none."""
    with reading(path):
        if path.suffix == ".gguf":
            from quire.models.gguf_file import read_gguf
            from quire.text.gguf_vocab import tokenizer_from_gguf_metadata

            return tokenizer_from_gguf_metadata(read_gguf(path).metadata)
        from quire.text.load import load_tokenizer

        return load_tokenizer(path)


def read_json(path: Path) -> Mapping[str, Any]:
    """Return the JSON object of a file. Raises `ModelLoadError` where it is none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not readable JSON ({error}); {AGAIN}.") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds no JSON object; {AGAIN}.")
    return value
