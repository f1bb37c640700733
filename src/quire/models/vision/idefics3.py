"""The encoder of Idefics 3 (arXiv:2408.12637) and SmolVLM: a SigLIP over one tile, then a shuffle and a projection.

    tile [3, 364, 364] → patches [676, 588] → layers [676, hidden] → groups of 2 × 2 [169, 4 · hidden] → [169, text]

The shuffle puts the patches of a square next to each other in one row, which the projection reads.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.layers.linear import Linear
from quire.layers.vit import LayerNorm, VitLayer
from quire.layers.weights import Build, WeightLoader, copy_into, prefixed
from quire.models.vision.pixels import flattened, pixel_values
from quire.spans import Span
from quire.vision_spec import VisionSpec


class Encoder:
    """One tile of pixels → the rows that its tokens have in place of embeddings."""

    def __init__(self, spec: VisionSpec, build: Build) -> None:
        self._spec = spec
        hidden, patch = spec.hidden_size, spec.patch_size
        self._patches = Linear({"patches": hidden}, 3 * patch * patch, build, bias=True)
        self._positions = torch.zeros((spec.image_size // spec.patch_size) ** 2, hidden, dtype=build.dtype)
        self._layers = [
            VitLayer(hidden, spec.num_heads, spec.intermediate_size, spec.activation, build)
            for _ in range(spec.num_layers)
        ]
        self._norm = LayerNorm(hidden, build.eps)
        self._projection = Linear({"proj": spec.text_hidden_size}, hidden * spec.merge**2, build)
        self._position_ids = position_ids(spec.image_size // patch)
        self._dtype = build.dtype
        self._values = pixel_values(spec)

    def weight_loaders(self) -> dict[str, WeightLoader]:
        """Return a loader for each tensor, under its name in checkpoints."""
        patches = self._patches.weight_loaders()
        loaders = {
            "embeddings.patch_embedding.weight": flattened(patches["patches.weight"]),
            "embeddings.patch_embedding.bias": patches["patches.bias"],
            "embeddings.position_embedding.weight": copy_into(self._positions),
            **prefixed("post_layernorm.", self._norm.weight_loaders()),
        }
        for index, layer in enumerate(self._layers):
            loaders |= prefixed(f"encoder.layers.{index}.", layer.weight_loaders())
        projection = prefixed("connector.modality_projection.", self._projection.weight_loaders())
        return {**prefixed("vision_model.", loaders), **projection}

    def __call__(self, span: Span) -> Tensor:
        """Return ``[span.length, text_hidden_size]``."""
        spec = self._spec
        side, patch, merge = spec.image_size // spec.patch_size, spec.patch_size, spec.merge
        pixels = np.frombuffer(span.data, np.uint8).reshape(3, side, patch, side, patch)
        values = np.stack([table[channel] for table, channel in zip(self._values, pixels, strict=True)])
        patches = torch.from_numpy(values).to(self._dtype).permute(1, 3, 0, 2, 4).reshape(side * side, -1)
        x = self._patches(patches) + self._positions[self._position_ids]
        for layer in self._layers:
            x = layer(x)
        x = self._norm(x).view(side // merge, merge, side // merge, merge, spec.hidden_size)
        return self._projection(
            x.transpose(1, 2).reshape(spec.num_tokens((spec.image_size, spec.image_size)), -1)
        )


def position_ids(side: int) -> Tensor:
    """Return the position of each patch of a full tile: ``[side²]``.

    As transformers computes them, in fp32: for some sizes, a patch falls into the bucket of its neighbour.
    """
    boundaries = torch.arange(1 / side, 1.0, 1 / side)
    step = 1.0 / torch.tensor(side)
    coordinates = torch.clamp(torch.arange(side, dtype=torch.float32) * step, max=1.0 - 1e-6)
    buckets = torch.bucketize(coordinates, boundaries, right=True)
    return (buckets[:, None] * side + buckets[None, :]).reshape(-1)
