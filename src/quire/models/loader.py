"""Weights of a checkpoint under their canonical names, one after another: safetensors, GGUF, or random.

Every tensor's shape is checked before it is used, and names must match exactly: a weight that is missing or that
nothing asks for is an error, for a model that loads "almost" answers nonsense. Where the type needs no change, tensors
are views of the mapped file: no second copy, and pages that nobody reads cost nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from quire.config import ModelConfig
from quire.errors import ModelLoadError
from quire.families import Take, WeightMap, weight_map
from quire.families.gguf import gguf_weight_map
from quire.families.weights import stored_shapes
from quire.models.block_formats import expand_mxfp4, expand_q8_0
from quire.models.gguf_file import read_gguf
from quire.models.random_weights import random_weights, stored_dtype
from quire.models.safetensors_file import StoredTensor, read_checkpoint
from quire.modelspec import weight_shapes

_TORCH = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "uint8": torch.uint8,
}


def iter_weights(model: ModelConfig, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (canonical name, tensor of ``dtype``) in the order of `weight_shapes`; ``correction_bias`` in float32.

    Tensors may be views of the mapped checkpoint: replace them, do not write into them.
    Raises `ModelLoadError` for a file, name or shape that is wrong, saying which.
    """
    if model.load_format == "random":
        return random_weights(model.spec, model.seed, dtype)
    path = Path(model.path)
    if path.is_dir():
        return _iter_mapped(model, weight_map(model.spec), read_checkpoint(path), dtype)
    file = read_gguf(path)
    arch = str(file.metadata.get("general.architecture"))
    return _iter_mapped(model, gguf_weight_map(model.spec, arch), file.tensors, dtype)


def load_weights(model: ModelConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return all weights of `iter_weights` by canonical name."""
    return dict(iter_weights(model, dtype))


def _iter_mapped(
    model: ModelConfig, names: WeightMap, stored: Mapping[str, StoredTensor], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    chosen = _choose(model.path, names, stored)
    for canonical, shape in weight_shapes(model.spec).items():
        take = chosen[canonical]
        tensor = _assemble(take, stored, stored_dtype(canonical, dtype))
        if tensor.shape != shape:
            raise ModelLoadError(
                f"{model.path}: {take.names[0]} gives {canonical} the shape {list(tensor.shape)}, and the "
                f"configuration asks for {list(shape)}; config.json and weights do not belong together."
            )
        yield canonical, tensor


def _choose(path: str, names: WeightMap, stored: Mapping[str, StoredTensor]) -> dict[str, Take]:
    """Pick the alternative that the checkpoint holds for each weight; check that nothing lacks and nothing is over."""
    chosen: dict[str, Take] = {}
    missing: list[str] = []
    for canonical, takes in names.sources.items():
        take = next((t for t in takes if all(name in stored for name in t.names)), None)
        if take is None:
            missing += [next(name for name in takes[0].names if name not in stored)]
        else:
            chosen[canonical] = take
    if missing:
        raise ModelLoadError(
            f"{path}: {len(missing)} weights are missing, {_some(missing)}; the checkpoint is incomplete or "
            "config.json belongs to another model."
        )
    used = {name for take in chosen.values() for name in take.names}
    ignored = re.compile("|".join(f"(?:{pattern})" for pattern in names.ignore))
    over = [name for name in stored if name not in used and not ignored.fullmatch(name)]
    if over:
        raise ModelLoadError(
            f"{path}: {len(over)} tensors have no place in this model, {_some(over)}; config.json belongs to "
            "another model, or the checkpoint has parts that Quire does not run."
        )
    for take in chosen.values():
        for name, shape in zip(take.names, stored_shapes(take), strict=True):
            _check_shape(name, stored[name], shape, packed=take.encoding != "plain")
    return chosen


def _check_shape(name: str, stored: StoredTensor, expected: tuple[int, ...], *, packed: bool) -> None:
    if (stored.dtype == "uint8") != packed:
        raise ModelLoadError(
            f"{stored.file}: {name} is of type {stored.dtype}, which is not how this weight is stored; config.json "
            "and weights do not belong together."
        )
    if stored.shape != expected:
        raise ModelLoadError(
            f"{stored.file}: {name} has shape {list(stored.shape)}, and the configuration asks for "
            f"{list(expected)}; config.json and weights do not belong together."
        )


def _some(names: Iterable[str]) -> str:
    first = sorted(names)[:3]
    return "for example " + ", ".join(first)


def _assemble(take: Take, stored: Mapping[str, StoredTensor], dtype: torch.dtype) -> torch.Tensor:
    """Do what a `Take` says; see there for the order."""
    cut: list[slice] = [slice(None)] * (take.dim + 1)
    cut[take.dim] = slice(take.start, take.stop, take.step)
    if take.encoding == "mxfp4":  # rows are cut before they are expanded
        blocks, scales = (_view(stored[name])[tuple(cut)] for name in take.names)
        return expand_mxfp4(blocks, scales, dtype)
    if take.stacked:
        tensor = torch.empty((len(take.names), *take.shape), dtype=dtype)
        for part, name in zip(tensor, take.names, strict=True):
            part.copy_(_view(stored[name]))
    else:
        tensor = _view(stored[take.names[0]])
    if take.transpose:
        tensor = tensor.transpose(-1, -2)
    if take.stop is not None or take.start or take.step != 1:
        tensor = tensor[tuple(cut)]
    if take.unpermute_heads:
        tensor = _unpermute(tensor, take.unpermute_heads)
    return tensor.to(dtype).contiguous()


def _view(stored: StoredTensor) -> torch.Tensor:
    """Return the stored tensor as a view of the mapping; Q8_0 is expanded to float32."""
    if stored.dtype == "q8_0":
        raw = torch.frombuffer(stored.buffer, dtype=torch.uint8, count=stored.num_bytes, offset=stored.offset)
        return expand_q8_0(raw, stored.shape)
    dtype = _TORCH[stored.dtype]
    count = stored.num_bytes // dtype.itemsize
    if count == 0:
        return torch.empty(stored.shape, dtype=dtype)
    if stored.offset % dtype.itemsize:  # a header of odd length: such bytes cannot be a view
        raw = torch.frombuffer(stored.buffer, dtype=torch.uint8, count=stored.num_bytes, offset=stored.offset)
        return raw.clone().view(dtype).view(stored.shape)
    return torch.frombuffer(stored.buffer, dtype=dtype, count=count, offset=stored.offset).view(stored.shape)


def _unpermute(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's order of the rows of q and k: pairs (i, i + dim/2) lie side by side there."""
    half = tensor.shape[0] // heads // 2
    return tensor.view(heads, half, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
