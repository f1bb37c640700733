"""RMSNorm with its weight."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.norm import (
    add_rms_norm,
    add_rms_norm_to_fp8,
    add_rms_norm_to_int8,
    rms_norm,
    rms_norm_to_int8,
)
from quire.kernels.quantized_rows import QuantizedRows
from quire.layers.weights import Build, WeightLoader, copy_into
from quire.quant.stored import Weight
from quire.weight_format import PLAIN, WeightFormat


class RmsNorm:
    """The weight is held in fp32; with ``plus_one`` (Gemma) it holds 1 + w.

    ``reader``: the format of the only linear that reads the result; if quantized, `enter` writes int8 or fp8 rows.
    """

    def __init__(
        self, size: int, build: Build, *, plus_one: bool = False, reader: WeightFormat = PLAIN
    ) -> None:
        self.weight = torch.zeros(size)
        self.eps = build.eps
        self._wide = build.wide_sums
        self._plus_one = plus_one
        self._norm = build.of(rms_norm)
        self._add = build.of(add_rms_norm)
        self._to_int8 = build.of(rms_norm_to_int8)
        self._add_to_int8 = build.of(add_rms_norm_to_int8)
        self._add_to_fp8 = build.of(add_rms_norm_to_fp8)
        self._reader, self._is_read_quantized, self._rows = reader, reader.quantized, reader.rows

    def load(self, weight: Weight) -> None:
        """Take ``weight [size]``."""
        copy_into(self.weight)(weight)
        if self._plus_one:
            self.weight.add_(1.0)

    def weight_loaders(self) -> dict[str, WeightLoader]:
        return {"weight": self.load}

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise over the last dimension; same shape and dtype."""
        return self._norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(norm(residual + x), residual + x)``."""
        return self._add(x, residual, self.weight, self.eps, self._wide)

    def enter(self, x: Tensor | None, residual: Tensor) -> tuple[Tensor | QuantizedRows, Tensor]:
        """Return ``(norm(residual + x), residual + x)``, the norm as its reader takes it; x None: nothing to add."""
        if self._reader.kind == "fp8":
            assert not self._wide
            return self._add_to_fp8(x, residual, self.weight, self.eps)
        if x is None:
            if self._is_read_quantized:
                return self._to_int8(residual, self.weight, self.eps, self._rows), residual
            return self(residual), residual
        if self._is_read_quantized:
            return self._add_to_int8(x, residual, self.weight, self.eps, self._rows, self._wide)
        return self.add(x, residual)
