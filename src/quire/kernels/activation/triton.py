"""Gated activations in Triton: elementwise, in fp32 with one rounding. Bound by memory: three numbers an output."""

from __future__ import annotations

import torch
import triton

from quire.kernels.activation.triton_kernels import gate_times_up
from quire.kernels.registry import register

KINDS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "swiglu_oai": 3}
BLOCK = 1024


@register("gated", "triton")
def gated(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """``[num_tokens, 2 · size]`` → ``[num_tokens, size]``."""
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        block = min(BLOCK, triton.next_power_of_2(size))
        gate_times_up[(tokens, triton.cdiv(size, block))](
            gate_up, gate_up.stride(0), y, size, KIND=KINDS[kind], BLOCK=block, num_warps=4
        )
    return y
