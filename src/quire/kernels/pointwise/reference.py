"""Pointwise ops in torch, from operations whose bits do not depend on where an element lies.

torch runs an elementwise loop in a vectorised body and a scalar tail, and for some functions the two differ in the
last bit, so that a value's result depends on its position and on how threads cut the tensor. Measured with torch
2.13 on AVX-512 (fp32): silu, sigmoid, gelu, exp2 differ; exp, tanh, erf, log, sqrt, rsqrt, division do not. Silu and
gelu are therefore written out in terms of exp, tanh and erf. Everything is computed in fp32 and rounded once.
"""

from __future__ import annotations

import math

import torch

from quire.kernels.linear.reference import quantize_rows
from quire.kernels.quantized_rows import QuantizedRows
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


_LIMIT = 7.0  # gpt-oss clamps the gate from above, and up on both sides
_ALPHA = 1.702


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """``1 / (1 + exp(−x))`` for fp32 ``x``, the same bits at every position."""
    return torch.exp(-x).add_(1.0).reciprocal_()


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """``x/2 · (1 + tanh(√(2/π) · (x + 0.044715·x³)))`` (Hendrycks and Gimpel 2016)."""
    inner = (x * x * x).mul_(0.044715).add_(x).mul_(math.sqrt(2.0 / math.pi))
    return inner.tanh_().add_(1.0).mul_(x).mul_(0.5)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """``x/2 · (1 + erf(x / √2))``."""
    return torch.erf(x * math.sqrt(0.5)).add_(1.0).mul_(x).mul_(0.5)


@register("gated", "reference")
def gated(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """``[num_tokens, 2 · size]`` → ``[num_tokens, size]``."""
    size = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :size].float(), gate_up[..., size:].float()
    if kind == "silu":
        y = sigmoid(gate).mul_(gate).mul_(up)
    elif kind == "gelu_tanh":
        y = gelu_tanh(gate).mul_(up)
    elif kind == "gelu":
        y = gelu(gate).mul_(up)
    else:
        assert kind == "swiglu_oai", kind
        gate, up = gate.clamp(max=_LIMIT), up.clamp(-_LIMIT, _LIMIT)
        y = sigmoid(gate * _ALPHA).mul_(gate).mul_(up + 1.0)
    return y.to(gate_up.dtype)


@register("gated_to_int8", "reference")
def gated_to_int8(gate_up: torch.Tensor, kind: str, group: int | None) -> QuantizedRows:
    return quantize_rows(gated(gate_up, kind), group)


@register("take_rows", "reference")
def take_rows(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """``[num_tokens]`` → ``[num_tokens, size]``."""
    return table.index_select(0, ids)
