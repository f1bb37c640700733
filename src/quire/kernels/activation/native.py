"""Native gated activations (csrc/cpu/gated_kernel.cpp): one call, the same operations in every lane."""

from __future__ import annotations

from functools import partial
from types import ModuleType

import torch

from quire.kernels.registry import VECTOR_LEVELS, register
from quire.kernels.threads import num_native_threads
from quire.kernels.workspace import empty

try:
    from quire import _native as native
except ImportError:  # no compiler at install
    native = None  # type: ignore[assignment]

GATES = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "swiglu_oai": 3}


def gated(module: ModuleType, isa: str, gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """``[num_tokens, 2 · size]`` → ``[num_tokens, size]``."""
    num_tokens, width = gate_up.shape
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    y = empty(num_tokens, width // 2, dtype=gate_up.dtype)
    module.gated(
        num_native_threads(),
        isa,
        gate_up.dtype == torch.bfloat16,
        GATES[kind],
        gate_up.data_ptr(),
        gate_up.stride(0),
        y.data_ptr(),
        num_tokens,
        width // 2,
    )
    return y


if native is not None and hasattr(native, "gated"):  # a build older than this source may lack it
    for level in VECTOR_LEVELS:
        if native.has_isa(level):
            register("gated", level)(partial(gated, native, level))
