"""The adapters of one linear, slot by slot, in the layout of the backend that reads them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from quire.kernels.linear.packed import PackedLinear
from quire.kernels.registry import Backend

RANK_ALIGN = 16  # ranks that lie together in the native layout


@dataclass(frozen=True, slots=True)
class LowRank:
    """One part's adapter: the linear gains ``scale · b a x``."""

    a: torch.Tensor  # [rank, in_features]
    b: torch.Tensor  # [part's out_features, rank]
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(slots=True)
class LoraStack:
    """``widths``: output features of each part of the linear. ``a``, ``b`` and ``packed`` are the backend's own."""

    widths: tuple[int, ...]
    in_features: int
    num_slots: int
    max_rank: int  # a multiple of RANK_ALIGN
    dtype: torch.dtype
    backend: Backend
    ranks: torch.Tensor  # int64 [num_slots, parts]; 0: the part is not adapted
    scales: torch.Tensor  # fp32, the same shape
    a: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    b: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    packed: dict[tuple[int, int], tuple[PackedLinear, PackedLinear]] = field(default_factory=dict)
