"""The weights of one linear, in the layout of the backend that multiplies with them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.kernels.registry import Backend


@dataclass(slots=True)
class PackedLinear:
    """``data`` is opaque but to the backend. ``bias [out_features]`` is plain."""

    out_features: int
    in_features: int
    data: torch.Tensor
    bias: torch.Tensor | None = None
    backend: Backend = "reference"
