"""Native rounding on load (csrc/cpu/quantize_weights_kernel.cpp): the bits of `quire.quant.rtn` at every level."""

from __future__ import annotations

from functools import partial
from types import ModuleType

import torch

from quire.kernels.linear.packed import QuantizedWeight
from quire.kernels.quantized_rows import num_groups
from quire.kernels.registry import NATIVE_LEVELS, register
from quire.kernels.threads import num_native_threads
from quire.weight_format import WeightFormat

try:
    from quire import _native as native
except ImportError:  # no compiler at install
    native = None  # type: ignore[assignment]

BITS = {"int8": 8, "int4": 4}


def round_to_nearest(
    module: ModuleType, isa: str, weight: torch.Tensor, held: WeightFormat
) -> QuantizedWeight:
    """``weight [out, in]`` → ``held``; other types than bf16 and fp32 become fp32 first."""
    if weight.dtype not in (torch.bfloat16, torch.float32):
        weight = weight.float()
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    num_rows, in_features = weight.shape
    q = torch.empty(num_rows, in_features, dtype=torch.int8)
    groups = num_groups(in_features, held.group)
    scale = torch.empty(num_rows, 1 if held.two_level else groups)
    multiplier = torch.empty(num_rows, groups, dtype=torch.uint8) if held.two_level else None
    module.quantize_weights(
        num_native_threads(),
        isa,
        BITS[held.kind],
        held.group or in_features,
        weight.dtype == torch.bfloat16,
        weight.data_ptr(),
        weight.stride(0),
        num_rows,
        in_features,
        q.data_ptr(),
        scale.data_ptr(),
        0 if multiplier is None else multiplier.data_ptr(),
    )
    return QuantizedWeight(held, q, scale, multiplier=multiplier)


if native is not None and hasattr(native, "quantize_weights"):  # a build older than this source may lack it
    for level in NATIVE_LEVELS:
        if native.has_isa(level):
            register("round_to_nearest", level)(partial(round_to_nearest, native, level))
