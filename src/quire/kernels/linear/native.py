"""Native linear (csrc/cpu/linear_kernel.cpp): packed panels of 32 columns, one order of summation for any rows.

One backend for each level of instructions that the CPU has, so that tests go over all of them.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType

import torch

from quire.kernels import huge_pages
from quire.kernels.embedding.native import take_packed_rows
from quire.kernels.linear.packed import PackedLinear
from quire.kernels.registry import NATIVE_LEVELS, register
from quire.kernels.threads import num_native_threads
from quire.kernels.workspace import empty

try:
    from quire import _native as native
except ImportError:  # no compiler at install
    native = None  # type: ignore[assignment]

PANEL = 32  # columns that lie together
TYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
STEP = {torch.bfloat16: 2, torch.float32: 1}  # consecutive k of one column that lie together


def pack_empty(out_features: int, in_features: int, dtype: torch.dtype) -> PackedLinear:
    """Zeros as ``[out/32, in/step, 32, step]``, the last panel and an odd last k padded."""
    step = STEP[dtype]
    shape = (-(-out_features // PANEL), -(-in_features // step), PANEL, step)
    return PackedLinear(out_features, in_features, huge_pages.zeros(*shape, dtype=dtype))


def write_rows(module: ModuleType, packed: PackedLinear, start: int, weight: torch.Tensor) -> None:
    source = weight.to(packed.data.dtype).contiguous()
    module.pack(
        num_native_threads(),
        TYPES[packed.data.dtype],
        source.data_ptr(),
        source.shape[0],
        source.shape[1],
        start,
        packed.data.data_ptr(),
    )


def read_rows(module: ModuleType, isa: str, packed: PackedLinear, ids: torch.Tensor) -> torch.Tensor:
    return take_packed_rows(module, isa, packed.data, packed.in_features, ids)


def linear(
    module: ModuleType,
    isa: str,
    x: torch.Tensor,
    packed: PackedLinear,
    out_dtype: torch.dtype,
    out: torch.Tensor | None,
) -> torch.Tensor:
    dtype = packed.data.dtype
    assert x.dtype == dtype, (x.dtype, dtype)
    num_tokens, in_features = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    if in_features % STEP[dtype]:  # the kernel reads whole pairs
        x = torch.nn.functional.pad(x, (0, 1))
    y = empty(num_tokens, packed.out_features, dtype=out_dtype) if out is None else out
    module.linear(
        num_native_threads(),
        isa,
        TYPES[dtype],
        x.data_ptr(),
        x.stride(0),
        packed.data.data_ptr(),
        packed.bias.data_ptr() if packed.bias is not None else 0,
        y.data_ptr(),
        y.stride(0),
        TYPES[out_dtype],
        num_tokens,
        packed.out_features,
        in_features,
    )
    return y


if native is not None:
    for level in NATIVE_LEVELS:
        if native.has_isa(level):
            register("linear.pack_empty", level)(pack_empty)
            register("linear.write_rows", level)(partial(write_rows, native))
            register("linear.read_rows", level)(partial(read_rows, native, level))
            register("linear", level)(partial(linear, native, level))
