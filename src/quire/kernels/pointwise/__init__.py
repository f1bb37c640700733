"""Ops on each row or element by itself: gated activations, look-ups, residual sums, scales, the cap of logits."""

from __future__ import annotations

from typing import Literal

import torch

from quire.kernels.pointwise import native, reference  # noqa: F401  registers both
from quire.kernels.quantized_rows import QuantizedRows
from quire.kernels.registry import Backend, find

__all__ = [
    "ActivationKind", "add_gated_rows", "add_rows", "cap_logits", "copy_heads", "gated", "gated_to_int8", "scale_rows",
    "take_rows", "widen_rows",
]  # fmt: skip

ActivationKind = Literal["silu", "gelu_tanh", "gelu", "swiglu_oai"]


def add_rows(x: torch.Tensor, other: torch.Tensor, *, backend: Backend = "reference") -> torch.Tensor:
    """``x + other``, both ``[num_tokens, size]``, in their dtype."""
    y: torch.Tensor = find("add_rows", backend)(x, other)
    return y


def scale_rows(x: torch.Tensor, scale: float, *, backend: Backend = "reference") -> torch.Tensor:
    """``x · scale`` in fp32, rounded once; ``x [num_tokens, size]``. The same tensor where ``scale`` is 1."""
    if scale == 1.0:
        return x
    y: torch.Tensor = find("scale_rows", backend)(x, scale)
    return y


def copy_heads(x: torch.Tensor, out: torch.Tensor, *, backend: Backend = "reference") -> None:
    """Write ``x [num_tokens, num_heads, size]`` into ``out``, a view of that shape and dtype."""
    assert x.shape == out.shape, (x.shape, out.shape)
    assert x.dtype == out.dtype, (x.dtype, out.dtype)
    find("copy_heads", backend)(x, out)


def widen_rows(x: torch.Tensor, *, backend: Backend = "reference") -> torch.Tensor:
    """``x [num_tokens, size]`` in fp32; the same tensor where it is fp32 already."""
    if x.dtype == torch.float32:
        return x
    y: torch.Tensor = find("widen_rows", backend)(x)
    return y


def add_gated_rows(
    x: torch.Tensor, other: torch.Tensor, gate: torch.Tensor, *, backend: Backend = "reference"
) -> torch.Tensor:
    """``x + other · sigmoid(gate)``, the product rounded to the dtype; all ``[num_tokens, size]``, gate of size 1."""
    y: torch.Tensor = find("add_gated_rows", backend)(x, other, gate)
    return y


def cap_logits(
    logits: torch.Tensor, scale: float, cap: float | None, *, backend: Backend = "reference"
) -> torch.Tensor:
    """``cap · tanh(logits · scale / cap)``, without a cap ``logits · scale``; fp32 ``[num_logits, vocab_size]``.

    May reuse the memory of ``logits``. The cap is Gemma 2's (arXiv:2408.00118, §2), the scale Granite's.
    """
    if scale == 1.0 and cap is None:
        return logits
    y: torch.Tensor = find("cap_logits", backend)(logits, scale, cap)
    return y


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


def take_rows(table: torch.Tensor, ids: torch.Tensor, *, backend: Backend = "reference") -> torch.Tensor:
    """``table [num_rows, size]``, ``ids [num_tokens]`` int64 → ``[num_tokens, size]``, a copy."""
    y: torch.Tensor = find("take_rows", backend)(table, ids)
    return y
