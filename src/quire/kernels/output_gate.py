"""The gate on attention's output (Qwen3-Next, Qwen3.5): one number per element, from the same row as the query."""

from __future__ import annotations

from torch import Tensor

from quire.kernels.pointwise import sigmoid
from quire.kernels.registry import native, op
from quire.kernels.workspace import empty, native_call, rows_at


@op("gate_rows")
def gate_rows(x: Tensor, gate: Tensor) -> Tensor:
    """``x · sigmoid(gate)`` in their dtype; ``x [num_tokens, size]``, ``gate`` the same, or one number per head."""
    return (x.float() * _spread(sigmoid(gate.float()), x)).to(x.dtype)


@op("scale_heads")
def scale_heads(x: Tensor, factor: Tensor) -> Tensor:
    """``x · factor`` in their dtype; ``x [num_tokens, size]``, ``factor [num_tokens, heads]`` for the heads of x."""
    return (x.float() * _spread(factor.float(), x)).to(x.dtype)


def _spread(of_heads: Tensor, x: Tensor) -> Tensor:
    return of_heads.repeat_interleave(x.shape[1] // of_heads.shape[1], dim=1)


@gate_rows.native()
def native_gate_rows(isa: str, x: Tensor, gate: Tensor) -> Tensor:
    return _gate(isa, x, gate, is_plain=False)


@scale_heads.native()
def native_scale_heads(isa: str, x: Tensor, factor: Tensor) -> Tensor:
    return _gate(isa, x, factor, is_plain=True)


def _gate(isa: str, x: Tensor, gate: Tensor, *, is_plain: bool) -> Tensor:
    assert x.dtype == gate.dtype, (x.dtype, gate.dtype)
    assert x.shape[1] % gate.shape[1] == 0, (x.shape, gate.shape)
    tokens, size = x.shape
    y, per = empty(tokens, size, dtype=x.dtype), size // gate.shape[1]
    native.gate_rows(
        *native_call(isa, x), *rows_at(x), *rows_at(gate), y.data_ptr(), tokens, size, per, is_plain
    )
    return y
