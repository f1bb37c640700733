"""Gated activations with torch's fused functions, in the tensor's own dtype: fewer passes, not exact."""

from __future__ import annotations

import torch
from torch.nn import functional

from quire.kernels.activation import reference
from quire.kernels.registry import register


@register("gated", "whole")
def gated(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """``[num_tokens, 2 · size]`` → ``[num_tokens, size]``."""
    gate, up = gate_up.chunk(2, -1)
    if kind == "silu":
        return functional.silu(gate).mul_(up)
    if kind in ("gelu", "gelu_tanh"):
        return functional.gelu(gate, approximate="tanh" if kind == "gelu_tanh" else "none").mul_(up)
    return reference.gated(gate_up, kind)
