"""Gated activations in Triton: elementwise, in fp32 with one rounding. Bound by memory: three numbers per output."""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl

from quire.kernels import pointwise
from quire.kernels.pointwise import GATES, ActivationKind
from quire.kernels.triton_overlap import follow, launch_options
from quire.kernels.workspace import unit_stride

BLOCK = 1024


@pointwise.gated.version("triton")
def gated(gate_up: torch.Tensor, kind: ActivationKind) -> torch.Tensor:
    gate_up = unit_stride(gate_up)
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        block = min(BLOCK, triton.next_power_of_2(size))
        gate_times_up[(tokens, triton.cdiv(size, block))](
            gate_up, gate_up.stride(0), y, size, KIND=GATES[kind], BLOCK=block, num_warps=4, **launch_options()
        )  # fmt: skip
    return y


@triton.jit
@no_type_check
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
@no_type_check
def gate_times_up(gate_up, stride, y, size, KIND: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Program (token, block of columns)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    follow(OVERLAP)
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
