"""Pointwise ops in torch: one operation and one rounding an element, so exact as they stand."""

from __future__ import annotations

import torch

from quire.kernels.registry import register


@register("add_rows", "reference")
def add_rows(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Both ``[num_tokens, size]``."""
    return x + other


@register("scale_rows", "reference")
def scale_rows(x: torch.Tensor, scale: float) -> torch.Tensor:
    """``[num_tokens, size]`` → the same."""
    return x * scale


@register("cap_logits", "reference")
def cap_logits(logits: torch.Tensor, scale: float, cap: float | None) -> torch.Tensor:
    """fp32 ``[num_logits, vocab_size]``, in place."""
    if scale != 1.0:
        logits *= scale
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)
