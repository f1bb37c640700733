"""Launches that overlap (programmatic dependent launch, compute capability 9.0 and later).

A step of few tokens is hundreds of kernels of some microseconds, and a good part of each is its start: until the
kernel before it has ended the device launches nothing, and then the memory answers late. Launched with the options of
`launch_options`, the programs of a kernel start while those of the kernel before still run, and `follow` holds them
until all that it wrote is there. Before `follow` a kernel may compute addresses, and read what the kernel before does
not write: weights, and what the host uploaded for the step (benchmarks/results/gpu-h100-2026-11-26.md).

The rule: every kernel that is launched so calls `follow`, in every program, before it reads what other kernels write
and before it writes. It then holds for all kernels before: the one before had waited for its own. A test compiles the
kernels and looks for reads before the wait whose addresses come from other arguments (`BEFORE_WAIT`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.triton_interpreter import interpreting

CAPABILITY = (9, 0)
# Arguments that a kernel may read before its wait: weights, and what was uploaded.
BEFORE_WAIT = {
    "attend_items": {"items", "cu_seqlens_q", "seq_lens"},
    "fold_items": {"tiles", "cu_seqlens_q"},
    "matmul_tiles": {"scale"},
    "multiply_few": {"scale", "power", "bias"},
    "normalize": {"weight"},
    "rope_store_heads": {"block_ids", "offsets"},
}


@lru_cache
def overlaps() -> bool:
    """Whether this process's GPU has it; the interpreter does not."""
    return (
        not interpreting() and torch.cuda.is_available() and torch.cuda.get_device_capability() >= CAPABILITY
    )


def launch_options() -> dict[str, Any]:
    """Options of a launch whose kernel takes OVERLAP."""
    return {"OVERLAP": True, "launch_pdl": True} if overlaps() else {"OVERLAP": False}


@triton.jit
@no_type_check
def follow(OVERLAP: tl.constexpr):
    """Wait until the kernel before has ended; then the next one's programs may start."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
