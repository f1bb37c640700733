"""The kernel of `kernels.activation.triton`."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def gate_times_up(gate_up, stride, y, size, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Program (token, block of columns)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    gate = tl.load(gate_up + token * stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * stride + size + column, mask=mask, other=0.0).to(tl.float32)
    if KIND == 0:
        value = sigmoid(gate) * gate * up
    elif KIND == 1:  # tanh(x) = 2 σ(2x) − 1
        inner = (gate * gate * gate * 0.044715 + gate) * 0.7978845608028654
        value = sigmoid(2.0 * inner) * gate * up
    elif KIND == 2:
        value = (tl.erf(gate * 0.7071067811865476) + 1.0) * gate * 0.5 * up
    else:
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        value = sigmoid(gate * 1.702) * gate * (up + 1.0)
    tl.store(y + token * size + column, value.to(y.dtype.element_ty), mask=mask)
