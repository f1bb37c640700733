"""Native gated activations (csrc/cpu/gated_kernel.cpp): one call, the same operations in every lane."""

from __future__ import annotations

from functools import partial
from types import ModuleType

import torch

from quire.kernels.quantized_rows import QuantizedRows, empty_rows, row_words
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
    y = empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype)
    _over_rows(module, isa, gate_up, kind, y, None)
    return y


def gated_to_int8(
    module: ModuleType, isa: str, gate_up: torch.Tensor, kind: str, group: int | None
) -> QuantizedRows:
    rows = empty_rows(gate_up.shape[0], gate_up.shape[1] // 2, group, gate_up.dtype)
    _over_rows(module, isa, gate_up, kind, None, rows)
    return rows


def _over_rows(
    module: ModuleType,
    isa: str,
    gate_up: torch.Tensor,
    kind: str,
    y: torch.Tensor | None,
    rows: QuantizedRows | None,
) -> None:
    num_tokens, width = gate_up.shape
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    module.gated(
        num_native_threads(),
        isa,
        gate_up.dtype == torch.bfloat16,
        GATES[kind],
        gate_up.data_ptr(),
        gate_up.stride(0),
        0 if y is None else y.data_ptr(),
        num_tokens,
        width // 2,
        *row_words(rows),
    )


if native is not None and hasattr(native, "gated"):  # a build older than this source may lack it
    for level in VECTOR_LEVELS:
        if native.has_isa(level):
            register("gated", level)(partial(gated, native, level))
            register("gated_to_int8", level)(partial(gated_to_int8, native, level))
