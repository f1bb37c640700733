"""An encoder of images with its weights, from the checkpoint of its model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from quire.config import ModelConfig
from quire.errors import ModelLoadError
from quire.families.vision import canonical, encoder_shapes, prefixes
from quire.kernels.registry import KernelChoice
from quire.layers.weights import Build
from quire.models.loader import random_tensors
from quire.models.safetensors_file import read_checkpoint
from quire.models.stored_weights import view
from quire.spans import Span
from quire.vision_spec import VisionSpec

Encode = Callable[[Span], Tensor]


def load_encoder(model: ModelConfig, dtype: torch.dtype, kernels: KernelChoice) -> Encode:
    """Return the encoder of ``model``: a span → its rows ``[length, hidden_size]``.

    Raises:
        ModelLoadError: a tensor is missing, has a wrong shape or is one that the encoder does not take.
    """
    vision = model.spec.vision
    assert vision is not None
    shapes = encoder_shapes(vision)
    encoder = import_module(f"quire.models.vision.{vision.kind}").Encoder(
        vision, Build(dtype, kernels, vision.eps)
    )
    loaders, missing = encoder.weight_loaders(), set(shapes)
    assert set(loaders) == missing, set(loaders) ^ missing
    is_random = model.load_format == "random"
    with torch.inference_mode():
        for name, tensor in (
            random_tensors(shapes, model.seed, dtype) if is_random else _stored(model.path, vision)
        ):
            if name not in shapes:
                raise ModelLoadError(f"{model.path} has a tensor {name!r} that the encoder does not take.")
            if tuple(tensor.shape) != shapes[name]:
                raise ModelLoadError(
                    f"{model.path}: {name} has the shape {list(tensor.shape)}, and vision_config asks for "
                    f"{list(shapes[name])}; config.json and weights do not belong together."
                )
            loaders[name](tensor.to(dtype) if tensor.dim() > 1 else tensor)
            missing.discard(name)
    if missing:
        some = ", ".join(sorted(missing)[:3])
        raise ModelLoadError(f"{model.path}: {len(missing)} tensors of the encoder are missing: {some}, …")
    encode: Encode = encoder
    return encode


def _stored(path: str, vision: VisionSpec) -> Iterator[tuple[str, Tensor]]:
    """Yield the encoder's tensors as they are stored, under their names in `encoder_shapes`."""
    for name, tensor in read_checkpoint(Path(path)).items():
        if name.startswith(prefixes(vision)) and (own := canonical(vision, name)):
            yield own, view(tensor)
            tensor.unmap_pages()
