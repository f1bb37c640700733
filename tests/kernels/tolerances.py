"""How far an op may be from its fp64 oracle: the largest error over the largest magnitude of the oracle's output.

One table, for every version of an op. It is written once, from the arithmetic: a few roundings of the dtype, grown by
the length of the longest sum in `cases`. It never loosens.
"""

from __future__ import annotations

import torch

TOLERANCES: dict[str, dict[torch.dtype, float]] = {
    "linear": {torch.float32: 2e-6, torch.bfloat16: 8e-3},
    # Beside the roundings of `linear`: group scales held in 11 bits. The oracle has the same int8 rows.
    "quantized_linear": {torch.float32: 5e-4, torch.bfloat16: 8e-3},
    # The oracle has the same fp8 rows; Hopper adds fp8 products in 14 bits, 64 at a time.
    "fp8_linear": {torch.float32: 5e-4, torch.bfloat16: 8e-3},
    "head_linear": {torch.float32: 2e-6, torch.bfloat16: 8e-3},
    "lora": {torch.float32: 2e-6, torch.bfloat16: 1.2e-2},  # A x is rounded between the two products
    "rms_norm": {torch.float32: 1e-6, torch.bfloat16: 5e-3},
    "gated": {torch.float32: 1e-6, torch.bfloat16: 5e-3},
    "rope": {torch.float32: 1e-6, torch.bfloat16: 5e-3},
    "attention": {torch.float32: 3e-6, torch.bfloat16: 8e-3},
    "route": {torch.float32: 2e-6},
    "experts": {torch.float32: 5e-6, torch.bfloat16: 2e-2},  # two products and an activation between
    "pointwise": {torch.float32: 1e-6},
    "gated_delta_rule": {torch.float32: 5e-6, torch.bfloat16: 8e-3},
}


def tolerance(op: str, dtype: torch.dtype) -> float:
    """Return the bound for ``op`` computed in ``dtype``."""
    return TOLERANCES[op][dtype]
