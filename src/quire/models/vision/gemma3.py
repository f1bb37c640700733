"""The encoder of Gemma 3 (arXiv:2503.19786): a SigLIP, whose patches are averaged square by square, and a projection.

view [3, 896, 896] → patches [4096, hidden] → means of 4 × 4 [256, hidden] → norm → [256, text]
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.layers.linear import Linear
from quire.layers.norm import RmsNorm
from quire.layers.weights import Build, WeightLoader, prefixed
from quire.models.vision.siglip import Siglip
from quire.quant.stored import Weight
from quire.spans import Span
from quire.vision_spec import VisionSpec


class Encoder:
    """One view of pixels → the rows that its tokens have in place of embeddings."""

    def __init__(self, spec: VisionSpec, build: Build) -> None:
        self._spec = spec
        self._tower = Siglip(spec, build)
        self._norm = RmsNorm(spec.hidden_size, build, plus_one=True)
        self._projection = Linear({"proj": spec.text_hidden_size}, spec.hidden_size, build)

    def weight_loaders(self) -> dict[str, WeightLoader]:
        """Return a loader for each tensor, under its name in checkpoints."""
        load = self._projection.weight_loaders()["proj.weight"]

        def load_columns(weight: Weight) -> None:
            assert isinstance(weight, Tensor)
            load(weight.t().contiguous())  # stored as [hidden, text]

        projector: dict[str, WeightLoader] = {"mm_input_projection_weight": load_columns}
        projector |= prefixed("mm_soft_emb_norm.", self._norm.weight_loaders())
        return {
            **prefixed("vision_tower.", self._tower.weight_loaders()),
            **prefixed("multi_modal_projector.", projector),
        }

    def __call__(self, span: Span) -> Tensor:
        """Return ``[span.length, text_hidden_size]``."""
        spec, merge = self._spec, self._spec.merge
        side = spec.image_size // spec.patch_size // merge
        squares = self._tower(span).view(side, merge, side, merge, spec.hidden_size)
        means = squares.to(torch.float32).mean(dim=(1, 3)).view(side * side, -1)
        return self._projection(self._norm(means.to(squares.dtype)))
