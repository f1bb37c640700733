"""Pointwise ops in torch: one operation and one rounding an element, so exact as they stand."""

from __future__ import annotations

import torch

from quire.kernels.activation.reference import sigmoid
from quire.kernels.registry import register


@register("add_rows", "reference")
def add_rows(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Both ``[num_tokens, size]``."""
    return x + other


@register("scale_rows", "reference")
def scale_rows(x: torch.Tensor, scale: float) -> torch.Tensor:
    """``[num_tokens, size]`` → the same."""
    return x * scale


@register("copy_heads", "reference")
def copy_heads(x: torch.Tensor, out: torch.Tensor) -> None:
    """``[num_tokens, num_heads, size]`` each."""
    out.copy_(x)


@register("widen_rows", "reference")
def widen_rows(x: torch.Tensor) -> torch.Tensor:
    """``[num_tokens, size]`` → the same in fp32."""
    return x.float()


@register("add_gated_rows", "reference")
def add_gated_rows(x: torch.Tensor, other: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """``[num_tokens, size]`` each, ``gate [num_tokens, 1]``."""
    return x + (other.float() * sigmoid(gate.float())).to(x.dtype)


@register("cap_logits", "reference")
def cap_logits(logits: torch.Tensor, scale: float, cap: float | None) -> torch.Tensor:
    """fp32 ``[num_logits, vocab_size]``, in place."""
    if scale != 1.0:
        logits *= scale
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)
