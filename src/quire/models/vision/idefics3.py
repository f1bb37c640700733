"""The encoder of Idefics 3 (arXiv:2408.12637) and SmolVLM: a SigLIP over one tile, then a shuffle and a projection.

    tile [3, 364, 364] → patches [676, 588] → layers [676, hidden] → groups of 2 × 2 [169, 4 · hidden] → [169, text]

The shuffle puts the patches of a square next to each other in one row, which the projection reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.layers.linear import Linear
from quire.layers.weights import Build, WeightLoader, prefixed
from quire.models.vision.siglip import Siglip
from quire.spans import Span
from quire.vision_spec import VisionSpec


class Encoder:
    """One tile of pixels → the rows that its tokens have in place of embeddings."""

    def __init__(self, spec: VisionSpec, build: Build) -> None:
        self._spec = spec
        self._tower = Siglip(spec, build, position_ids(spec.image_size // spec.patch_size))
        self._projection = Linear({"proj": spec.text_hidden_size}, spec.hidden_size * spec.merge**2, build)

    def weight_loaders(self) -> dict[str, WeightLoader]:
        """Return a loader for each tensor, under its name in checkpoints."""
        projection = prefixed("connector.modality_projection.", self._projection.weight_loaders())
        return {**prefixed("vision_model.", self._tower.weight_loaders()), **projection}

    def __call__(self, span: Span) -> Tensor:
        """Return ``[span.length, text_hidden_size]``."""
        spec, merge = self._spec, self._spec.merge
        side = spec.image_size // spec.patch_size // merge
        x = self._tower(span).view(side, merge, side, merge, spec.hidden_size)
        return self._projection(x.transpose(1, 2).reshape(side * side, -1))


def position_ids(side: int) -> Tensor:
    """Return the position of each patch of a full tile: ``[side²]``.

    As transformers computes them, in fp32: for some sizes, a patch falls into the bucket of its neighbour.
    """
    boundaries = torch.arange(1 / side, 1.0, 1 / side)
    step = 1.0 / torch.tensor(side)
    coordinates = torch.clamp(torch.arange(side, dtype=torch.float32) * step, max=1.0 - 1e-6)
    buckets = torch.bucketize(coordinates, boundaries, right=True)
    return (buckets[:, None] * side + buckets[None, :]).reshape(-1)
