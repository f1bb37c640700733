"""LayerNorm without a bias, with its weight: Command R's norm."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.norm.centered import add_centered_norm, centered_norm
from quire.layers.weights import Build, WeightLoader, copy_into


class CenteredNorm:
    """Used as `RmsNorm` is, with its weight in fp32. The rows are plain: a quantized reader rounds them itself."""

    def __init__(self, size: int, build: Build, *, plus_one: bool = False) -> None:
        assert not plus_one
        self.weight, self.eps, self._wide = torch.zeros(size), build.eps, build.wide_sums
        self._norm, self._add = build.of(centered_norm), build.of(add_centered_norm)

    def weight_loaders(self) -> dict[str, WeightLoader]:
        return {"weight": copy_into(self.weight)}

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(norm(residual + x), residual + x)``."""
        return self._add(x, residual, self.weight, self.eps, self._wide)

    def enter(self, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(norm(residual + x), residual + x)``; x None: nothing to add."""
        if x is None:
            return self._norm(residual, self.weight, self.eps), residual
        return self.add(x, residual)
