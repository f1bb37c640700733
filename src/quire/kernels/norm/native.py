"""Native RMSNorm (csrc/cpu/norm_kernel.cpp): one pass for the sum of squares, in an order fixed by the row's length."""

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


def rms_norm(module: ModuleType, isa: str, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x [num_tokens, size]`` or ``[num_tokens, num_heads, size]`` → the same shape and dtype."""
    assert weight.is_contiguous()
    if x.stride(-1) != 1 or x.dim() not in (2, 3):
        x = x.contiguous()
    if x.dim() == 2:
        (tokens, size), heads, head_stride = x.shape, 1, 0
    elif x.dim() == 3:
        (tokens, heads, size), head_stride = x.shape, x.stride(1)
    else:
        return rms_norm(module, isa, x.view(-1, x.shape[-1]), weight, eps).view(x.shape)
    y = empty(*x.shape, dtype=x.dtype)
    module.rms_norm(
        num_native_threads(),
        isa,
        x.dtype == torch.bfloat16,
        x.data_ptr(),
        x.stride(0),
        head_stride,
        0,
        0,
        weight.data_ptr(),
        size if weight.dim() == 2 else 0,
        eps,
        y.data_ptr(),
        0,
        tokens,
        heads,
        size,
    )
    return y


def add_rms_norm(
    module: ModuleType, isa: str, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both ``[num_tokens, size]`` → (normed, sum)."""
    assert x.dtype == residual.dtype, (x.dtype, residual.dtype)
    assert weight.is_contiguous()
    tokens, size = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    if residual.stride(1) != 1:
        residual = residual.contiguous()
    y = empty(tokens, size, dtype=x.dtype)
    total = empty(tokens, size, dtype=x.dtype)
    module.rms_norm(
        num_native_threads(),
        isa,
        x.dtype == torch.bfloat16,
        x.data_ptr(),
        x.stride(0),
        0,
        residual.data_ptr(),
        residual.stride(0),
        weight.data_ptr(),
        0,
        eps,
        y.data_ptr(),
        total.data_ptr(),
        tokens,
        1,
        size,
    )
    return y, total


if native is not None and hasattr(native, "rms_norm"):  # a build older than this source may lack it
    for level in VECTOR_LEVELS:
        if native.has_isa(level):
            register("rms_norm", level)(partial(rms_norm, native, level))
            register("add_rms_norm", level)(partial(add_rms_norm, native, level))
