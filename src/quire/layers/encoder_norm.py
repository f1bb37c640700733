"""LayerNorm with its weights, and the choice of an encoder's kind of norm."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.encoder_spec import EncoderSpec
from quire.kernels.encoder import add_layer_norm, layer_norm
from quire.layers.norm import RmsNorm
from quire.layers.weights import Build, WeightLoader, copy_into


class LayerNorm:
    """LayerNorm with its weight, and a bias where the model has one; both are held in fp32."""

    def __init__(self, size: int, build: Build, *, bias: bool) -> None:
        self.weight = torch.ones(size)
        self.bias = torch.zeros(size) if bias else None
        self._eps = build.eps
        self._norm, self._add = build.of(layer_norm), build.of(add_layer_norm)

    def weight_loaders(self) -> dict[str, WeightLoader]:
        found = {"weight": copy_into(self.weight)}
        return found if self.bias is None else {**found, "bias": copy_into(self.bias)}

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise each row; same shape and dtype."""
        return self._norm(x, self.weight, self.bias, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(norm(residual + x), residual + x)``."""
        return self._add(x, residual, self.weight, self.bias, self._eps)


def norm_of(encoder: EncoderSpec, size: int, build: Build) -> LayerNorm | RmsNorm:
    """Return a norm of the kind that ``encoder`` has."""
    if encoder.norm == "layer":
        return LayerNorm(size, build, bias=encoder.norm_bias)
    return RmsNorm(size, build, plus_one=encoder.norm == "rms_plus_one")
