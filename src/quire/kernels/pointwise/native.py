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


def copy_heads(module: ModuleType, isa: str, x: torch.Tensor, out: torch.Tensor) -> None:
    """``[num_tokens, num_heads, size]`` each."""
    assert x.stride(2) == out.stride(2) == 1
    module.copy_heads(
        num_native_threads(),
        isa,
        x.dtype == torch.bfloat16,
        x.data_ptr(),
        x.stride(0),
        x.stride(1),
        out.data_ptr(),
        out.stride(0),
        out.stride(1),
        *x.shape,
    )


def widen_rows(module: ModuleType, isa: str, x: torch.Tensor) -> torch.Tensor:
    """``[num_tokens, size]`` → the same in fp32."""
    assert x.stride(1) == 1
    y = empty(*x.shape, dtype=torch.float32)
    module.widen_rows(
        num_native_threads(),
        isa,
        x.dtype == torch.bfloat16,
        x.data_ptr(),
        x.stride(0),
        y.data_ptr(),
        *x.shape,
    )
    return y


def add_gated_rows(
    module: ModuleType, isa: str, x: torch.Tensor, other: torch.Tensor, gate: torch.Tensor
) -> torch.Tensor:
    """``[num_tokens, size]`` each, ``gate [num_tokens, 1]``."""
    assert x.dtype == other.dtype == gate.dtype, (x.dtype, other.dtype, gate.dtype)
    assert x.stride(1) == other.stride(1) == 1
    y = empty(*x.shape, dtype=x.dtype)
    module.add_gated_rows(
        num_native_threads(),
        isa,
        x.dtype == torch.bfloat16,
        x.data_ptr(),
        x.stride(0),
        other.data_ptr(),
        other.stride(0),
        gate.data_ptr(),
        gate.stride(0),
        y.data_ptr(),
        *x.shape,
    )
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
            if hasattr(native, "copy_heads"):
                register("copy_heads", level)(partial(copy_heads, native, level))
                register("widen_rows", level)(partial(widen_rows, native, level))
                register("add_gated_rows", level)(partial(add_gated_rows, native, level))
