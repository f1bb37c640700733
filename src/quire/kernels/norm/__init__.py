"""RMSNorm (Zhang and Sennrich 2019), in fp32 with one rounding at the end.

``weight`` is fp32. Gemma's ``1 + w`` is formed once, at load (`layers.norm`), so the op has one form.
"""

from __future__ import annotations

import torch

from quire.kernels.norm import native, reference  # noqa: F401  registers both
from quire.kernels.quantized_rows import QuantizedRows
from quire.kernels.registry import Backend, find

__all__ = ["add_rms_norm", "add_rms_norm_to_fp8", "add_rms_norm_to_int8", "rms_norm", "rms_norm_to_int8"]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, backend: Backend = "reference"
) -> torch.Tensor:
    """``x [..., size]`` → ``x / sqrt(mean(x²) + eps) · weight`` in x's dtype.

    ``weight``: ``[size]``, or ``[num_heads, size]`` for ``x [num_tokens, num_heads, size]`` with one weight per head.
    """
    y: torch.Tensor = find("rms_norm", backend)(x, weight, eps)
    return y


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    backend: Backend = "reference",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(rms_norm(residual + x), residual + x)``; all ``[num_tokens, size]``. May reuse both inputs' memory."""
    y: tuple[torch.Tensor, torch.Tensor] = find("add_rms_norm", backend)(x, residual, weight, eps)
    return y


def rms_norm_to_int8(
    x: torch.Tensor, weight: torch.Tensor, eps: float, group: int | None, *, backend: Backend = "reference"
) -> QuantizedRows:
    """`quantize_rows` of the norm of ``x [num_tokens, size]``: the same bits in one pass."""
    rows: QuantizedRows = find("rms_norm_to_int8", backend)(x, weight, eps, group)
    return rows


def add_rms_norm_to_int8(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group: int | None,
    *,
    backend: Backend = "reference",
) -> tuple[QuantizedRows, torch.Tensor]:
    """`quantize_rows` of the norm that `add_rms_norm` gives: (int8 rows of the norm, residual + x)."""
    y: tuple[QuantizedRows, torch.Tensor] = find("add_rms_norm_to_int8", backend)(
        x, residual, weight, eps, group
    )
    return y


def add_rms_norm_to_fp8(
    x: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    backend: Backend = "reference",
) -> tuple[QuantizedRows, torch.Tensor]:
    """The norm of residual + x as fp8 rows with one scale each, and the sum; x None: nothing to add."""
    rows, scale, total = find("add_rms_norm_to_fp8", backend)(
        *((residual, None) if x is None else (x, residual)), weight, eps
    )
    no_sums = scale.new_empty(len(scale), 0, dtype=torch.int32)
    return QuantizedRows(rows, scale.unsqueeze(1), no_sums, rows.shape[1], None, residual.dtype), total
