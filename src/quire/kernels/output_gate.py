"""The gate on attention's output (Qwen3-Next, Qwen3.5): one number per element, from the same row as the query."""

from __future__ import annotations

from torch import Tensor

from quire.kernels.pointwise import sigmoid
from quire.kernels.registry import native, op
from quire.kernels.workspace import call_of, empty, rows_of


@op("gate_rows")
def gate_rows(x: Tensor, gate: Tensor) -> Tensor:
    """``x · sigmoid(gate)``, both ``[num_tokens, size]``, in their dtype."""
    return (x.float() * sigmoid(gate.float())).to(x.dtype)


@gate_rows.native()
def native_gate_rows(isa: str, x: Tensor, gate: Tensor) -> Tensor:
    assert x.dtype == gate.dtype, (x.dtype, gate.dtype)
    y = empty(*x.shape, dtype=x.dtype)
    native.gate_rows(*call_of(isa, x), *rows_of(x), *rows_of(gate), y.data_ptr(), *x.shape)
    return y
