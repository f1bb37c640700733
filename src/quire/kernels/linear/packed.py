"""The weights of one linear, in the layout of the backend that multiplies with them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.kernels.registry import Backend
from quire.weight_format import PLAIN, WeightFormat


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A quantized matrix on its way into a packed layout; see `quire.weight_format` for the formula."""

    format: WeightFormat
    q: torch.Tensor  # int8 [out, in]: −127 … 127, or −8 … 7 for int4
    scale: torch.Tensor  # fp32 [out, in / group]
    offset: torch.Tensor | None = None  # fp32, the same shape; present where format.has_offset

    @property
    def shape(self) -> torch.Size:
        return self.q.shape


@dataclass(slots=True)
class PackedLinear:
    """``data`` is opaque but to the backend. ``bias [out_features]`` is plain."""

    out_features: int
    in_features: int
    data: torch.Tensor
    bias: torch.Tensor | None = None
    backend: Backend = "reference"
    format: WeightFormat = PLAIN
