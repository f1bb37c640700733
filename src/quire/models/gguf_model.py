"""What a GGUF file is as a model: its spec, its formats and where each weight lies. Headers only; torch-free."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from quire.errors import ModelLoadError
from quire.families.gguf import spec_from_gguf
from quire.families.gguf_maps import SHARED_GATE, XIELU_ALPHAS, drafting_tensors, gguf_weight_map
from quire.families.gguf_types import BLOCK_TYPES
from quire.models.gguf_file import GgufFile, read_gguf
from quire.models.gguf_split import models_among
from quire.models.safetensors_file import StoredTensor
from quire.models.weight_sources import FLOATS, Source, find_sources, stored_formats
from quire.modelspec import ModelSpec
from quire.text.gguf_vocab import end_ids
from quire.weight_format import WeightFormat


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A model in a GGUF file, or in the parts of a split one."""

    path: Path  # the file, or its first part
    spec: ModelSpec
    files: tuple[Path, ...]
    dtype: str  # the type of most of the weights' bytes
    formats: Mapping[str, WeightFormat]
    remarks: tuple[str, ...]  # contents that no answer uses


def read_gguf_model(path: Path, *, weights: bool = True) -> GgufModel:
    """Return the model at ``path``, a file or any part of one; without ``weights`` its formats are left out.

    Raises the errors of `read_gguf`, of `spec_from_gguf` and of `find_sources`.
    """
    file = read_gguf(path)
    where = str(file.path)
    spec = spec_from_gguf(file.metadata, file.tensors, file.floats, where)
    dtype = _common_dtype(file)
    eos = tuple(dict.fromkeys((*spec.eos_token_ids, *end_ids(file.metadata))))
    spec = replace(spec, dtype="bfloat16" if dtype in BLOCK_TYPES else dtype, eos_token_ids=eos)
    formats = stored_formats(spec, _sources(file, spec)) if weights else {}
    return GgufModel(file.path, spec, file.files, dtype, formats, _unread(file, spec))


def gguf_sources(path: Path, spec: ModelSpec) -> tuple[Mapping[str, StoredTensor], Mapping[str, Source]]:
    """Return every tensor of the file, and where each weight of ``spec`` comes from."""
    file = read_gguf(path)
    return _tensors(file), _sources(file, spec)


def _tensors(file: GgufFile) -> dict[str, StoredTensor]:
    """Return the file's tensors, and the weights in its metadata.

    A matrix of one row, the gate of a shared expert, is a vector in some files.
    """
    weights = {key: file.lists[key] for key in XIELU_ALPHAS if key in file.lists}
    return weights | {
        name: replace(tensor, shape=(1, *tensor.shape))
        if name.endswith(SHARED_GATE) and len(tensor.shape) == 1
        else tensor
        for name, tensor in file.tensors.items()
    }


def _sources(file: GgufFile, spec: ModelSpec) -> dict[str, Source]:
    return find_sources(str(file.path), gguf_weight_map(spec, file.metadata), _tensors(file))


def _unread(file: GgufFile, spec: ModelSpec) -> tuple[str, ...]:
    """Return a line that names the tensors for multi-token prediction, where there are any."""
    patterns = drafting_tensors(spec, file.metadata)
    names = sorted(name for name in file.tensors if any(re.fullmatch(pattern, name) for pattern in patterns))
    if not names:
        return ()
    return (f"{len(names)} tensors for multi-token prediction (nextn), for example {names[0]}: not read",)


def _common_dtype(file: GgufFile) -> str:
    sizes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        if tensor.dtype in (*FLOATS, *BLOCK_TYPES):
            sizes[tensor.dtype] += tensor.num_bytes
    return sizes.most_common(1)[0][0] if sizes else "bfloat16"


def only_model(folder: Path) -> Path:
    """Return the one GGUF model of a folder. Raises `ModelLoadError` naming what there is."""
    names = models_among(sorted(path.name for path in folder.glob("*.gguf")))
    if len(names) == 1:
        return folder / names[0]
    if not names:
        raise ModelLoadError(
            f"{folder} has neither config.json nor a GGUF file: it is no model folder; download the whole model."
        )
    raise ModelLoadError(f"{folder} has {len(names)} GGUF files ({', '.join(names)}): name one of them.")
