"""Native look-up of rows (csrc/cpu/gather_kernel.cpp), plain and out of a packed weight."""

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


def take_rows(module: ModuleType, isa: str, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """``table [num_rows, size]``, ``ids [num_tokens]`` → ``[num_tokens, size]``."""
    assert table.stride(1) == 1
    y = empty(ids.shape[0], table.shape[1], dtype=table.dtype)
    _gather(module, isa, table, table.stride(0), ids, y)
    return y


def take_packed_rows(
    module: ModuleType, isa: str, packed: torch.Tensor, size: int, ids: torch.Tensor
) -> torch.Tensor:
    """The same of a weight ``[.., size]`` in panels of 32 rows (`kernels.linear.native`)."""
    assert packed.is_contiguous()
    y = empty(ids.shape[0], size, dtype=packed.dtype)
    _gather(module, isa, packed, 0, ids, y)
    return y


def _gather(
    module: ModuleType, isa: str, table: torch.Tensor, stride: int, ids: torch.Tensor, y: torch.Tensor
) -> None:
    assert ids.dtype == torch.int64, ids.dtype
    assert ids.is_contiguous()
    module.gather(
        num_native_threads(),
        isa,
        table.dtype == torch.bfloat16,
        table.data_ptr(),
        stride,
        ids.data_ptr(),
        y.data_ptr(),
        *y.shape,
    )


if native is not None and hasattr(native, "gather"):  # a build older than this source may lack it
    for level in VECTOR_LEVELS:
        if native.has_isa(level):
            register("take_rows", level)(partial(take_rows, native, level))
