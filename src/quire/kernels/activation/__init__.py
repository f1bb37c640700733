"""Gated activations: ``act(gate) · up`` over the fused output of the gate and up matrices."""

from __future__ import annotations

from typing import Literal

import torch

from quire.kernels.activation import native, reference  # noqa: F401  registers them
from quire.kernels.quantized_rows import QuantizedRows
from quire.kernels.registry import Backend, find

__all__ = ["ActivationKind", "gated", "gated_to_int8"]

ActivationKind = Literal["silu", "gelu_tanh", "gelu", "swiglu_oai"]


def gated(gate_up: torch.Tensor, kind: ActivationKind, *, backend: Backend = "reference") -> torch.Tensor:
    """``gate_up [num_tokens, 2 · size]`` (gate first, then up) → ``[num_tokens, size]``, contiguous.

    silu: ``g·σ(g)·u`` (Shazeer 2020); gelu: erf or tanh form; swiglu_oai (gpt-oss): with g ≤ 7 and |u| ≤ 7,
    ``g·σ(1.702·g)·(u + 1)``.
    """
    y: torch.Tensor = find("gated", backend)(gate_up, kind)
    return y


def gated_to_int8(
    gate_up: torch.Tensor, kind: ActivationKind, group: int | None, *, backend: Backend = "reference"
) -> QuantizedRows:
    """`quantize_rows` of what `gated` makes: the same bits in one pass."""
    rows: QuantizedRows = find("gated_to_int8", backend)(gate_up, kind, group)
    return rows
