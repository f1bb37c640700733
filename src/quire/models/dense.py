"""The linears of sentence-transformers that a pooled vector goes through (`DenseSpec`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, relu

from quire.config import ModelConfig
from quire.errors import ModelLoadError
from quire.kernels.threads import one_torch_thread
from quire.models.loader import random_tensors
from quire.models.safetensors_file import read_safetensors
from quire.models.sentence_transformers import DenseSpec, dense_of
from quire.models.stored_weights import view

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda vector: vector,
    "tanh": torch.tanh,
    "gelu": gelu,
    "relu": relu,
}


class DenseLayers:
    """Linears in fp32; a vector at a time, so that its bits depend on nothing else."""

    def __init__(self, model: ModelConfig) -> None:
        """Read the weights.

        Raises:
            ModelLoadError: a file or a tensor is missing, or has a wrong shape.
        """
        specs = dense_of(Path(model.path)) if model.spec.sentence is not None else ()
        self._layers = [(spec, _weights(model, spec)) for spec in specs]

    def __call__(self, vector: Tensor) -> Tensor:
        """``[in_features]`` of the first fp32 → ``[out_features]`` of the last."""
        for spec, weights in self._layers:
            with one_torch_thread():
                vector = linear(vector, weights["linear.weight"], weights.get("linear.bias"))
            vector = _ACTIVATIONS[spec.activation](vector)
        return vector


def _weights(model: ModelConfig, spec: DenseSpec) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (spec.out_features, spec.in_features)}
    shapes |= {"linear.bias": (spec.out_features,)} if spec.bias else {}
    if model.load_format == "random":
        return dict(random_tensors(shapes, model.seed, torch.float32))
    path = spec.folder / "model.safetensors"
    if not path.is_file():
        raise ModelLoadError(
            f"{path} is missing: the vectors of this model go through it; download it again."
        )
    stored = read_safetensors(path)
    stored_shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    if stored_shapes != shapes:
        raise ModelLoadError(f"{path} has {stored_shapes}, and its config.json asks for {shapes}.")
    return {name: view(tensor).float().clone() for name, tensor in stored.items()}
