"""SigLIP (arXiv:2303.15343) over one square view: pixels → a row per patch, after the last norm.

pixels [3, edge, edge] → patches [n, 3 · patch²] → layers [n, hidden]
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


class Siglip:
    """The tower: patches, learned positions, layers and a norm."""

    def __init__(self, spec: VisionSpec, build: Build, position_ids: Tensor | None = None) -> None:
        """``position_ids [n]``: the learned position of each patch; None: its own number."""
        self._spec, self._dtype = spec, build.dtype
        hidden, patch = spec.hidden_size, spec.patch_size
        self._patches = Linear({"patches": hidden}, 3 * patch * patch, build, bias=True)
        self._positions = torch.zeros((spec.image_size // patch) ** 2, hidden, dtype=build.dtype)
        self._position_ids = position_ids
        self._layers = [
            VitLayer(hidden, spec.num_heads, spec.intermediate_size, spec.activation, build)
            for _ in range(spec.num_layers)
        ]
        self._norm = LayerNorm(hidden, build.eps)
        self._values = pixel_values(spec)

    def weight_loaders(self) -> dict[str, WeightLoader]:
        """Return a loader for each tensor, under the names of SigLIP's checkpoints."""
        patches = self._patches.weight_loaders()
        loaders = {
            "embeddings.patch_embedding.weight": flattened(patches["patches.weight"]),
            "embeddings.patch_embedding.bias": patches["patches.bias"],
            "embeddings.position_embedding.weight": copy_into(self._positions),
            **prefixed("post_layernorm.", self._norm.weight_loaders()),
        }
        for index, layer in enumerate(self._layers):
            loaders |= prefixed(f"encoder.layers.{index}.", layer.weight_loaders())
        return loaders

    def __call__(self, span: Span) -> Tensor:
        """Return ``[n, hidden_size]``, row by row of patches."""
        spec = self._spec
        side, patch = spec.image_size // spec.patch_size, spec.patch_size
        pixels = np.frombuffer(span.data, np.uint8).reshape(3, side, patch, side, patch)
        values = np.stack([table[channel] for table, channel in zip(self._values, pixels, strict=True)])
        patches = torch.from_numpy(values).to(self._dtype).permute(1, 3, 0, 2, 4).reshape(side * side, -1)
        positions = self._positions if self._position_ids is None else self._positions[self._position_ids]
        x = self._patches(patches) + positions
        for layer in self._layers:
            x = layer(x)
        return self._norm(x)
