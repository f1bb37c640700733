"""The RMSNorm of q and k heads, as data."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class QkNorm:
    """fp32 weights ``[head_dim]``, or with ``over_all`` (OLMo 2) ``[heads · head_dim]``: one norm of all heads."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float
    over_all: bool = False
