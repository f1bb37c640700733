"""Native pointwise ops (csrc/cpu/pointwise_kernel.cpp)."""

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


def add_rows(module: ModuleType, isa: str, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Both ``[num_tokens, size]``."""
    assert x.dtype == other.dtype, (x.dtype, other.dtype)
    assert x.stride(1) == 1
    assert other.stride(1) == 1
    y = empty(*x.shape, dtype=x.dtype)
    module.add_rows(
        num_native_threads(),
        isa,
        x.dtype == torch.bfloat16,
        x.data_ptr(),
        x.stride(0),
        other.data_ptr(),
        other.stride(0),
        y.data_ptr(),
        *x.shape,
    )
    return y


def scale_rows(module: ModuleType, isa: str, x: torch.Tensor, scale: float) -> torch.Tensor:
    """``[num_tokens, size]`` → the same."""
    y = empty(*x.shape, dtype=x.dtype)
    _scale(module, isa, x, scale, 0.0, y)
    return y


def cap_logits(
    module: ModuleType, isa: str, logits: torch.Tensor, scale: float, cap: float | None
) -> torch.Tensor:
    """fp32 ``[num_logits, vocab_size]``, in place."""
    assert logits.is_contiguous()
    _scale(module, isa, logits, scale, cap or 0.0, logits)
    return logits


def _scale(module: ModuleType, isa: str, x: torch.Tensor, scale: float, cap: float, y: torch.Tensor) -> None:
    assert x.stride(1) == 1
    module.scale_rows(
        num_native_threads(),
        isa,
        x.dtype == torch.bfloat16,
        x.data_ptr(),
        x.stride(0),
        scale,
        cap,
        y.data_ptr(),
        *x.shape,
    )


if native is not None and hasattr(native, "scale_rows"):  # a build older than this source may lack it
    for level in VECTOR_LEVELS:
        if native.has_isa(level):
            register("add_rows", level)(partial(add_rows, native, level))
            register("scale_rows", level)(partial(scale_rows, native, level))
            register("cap_logits", level)(partial(cap_logits, native, level))
