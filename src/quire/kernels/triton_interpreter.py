"""Triton's interpreter, with bf16 as a GPU computes it. `quire.kernels.triton_ops` imports it before any kernel.

The interpreter (``TRITON_INTERPRET=1``, numpy on a CPU) of Triton 3.6 keeps bf16 as its bits, and three things then go
wrong: ``tl.dot`` multiplies the bits as integers, a cast from fp32 drops bits instead of rounding to nearest even, and
a cast from integers copies them. Rounding to fp8 has the same faults. And ``tl.dot`` is ``np.matmul``: with OpenBLAS's
kernels for AVX2, which it also takes on Zen 5, a row's last bits depend on its number in the tile. `np.einsum` adds up
every element in the same order. A GPU uses nothing of this file. `--device interpret` needs it, and so do the tests.
"""

# mypy: ignore-errors
from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton import knobs
from triton.runtime import interpreter

_TORCH = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}


def interpreting() -> bool:
    """Whether kernels of this process run in the interpreter."""
    return bool(knobs.runtime.interpret)


def repair() -> None:
    """Replace the interpreter's dot and casts, once per process; a later call changes nothing."""
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    np_type = interpreter._get_np_dtype
    if getattr(builder, "repaired_by_quire", False):
        return
    plain_cast = builder.cast_impl

    def cast(self, src, dst_type) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if not _is_narrow(source) and not _is_narrow(target):
            return plain_cast(self, src, dst_type)
        wide = _widen(src.data, source)
        return handle(_narrow(wide, target, np_type(dst_type)), target)

    def dot(self, a, b, d, input_precision, max_num_imprecise_acc) -> Any:
        wide = _widen(a.data, a.dtype.scalar), _widen(b.data, b.dtype.scalar)
        product = np.einsum("...mk,...kn->...mn", *wide, dtype=d.data.dtype)
        return handle(product + d.data, d.dtype.scalar)

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_too(
        tensor, scope
    ) -> None:  # int() of an array of one element is an error since numpy 2.4
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_too
    builder.cast_impl = cast
    builder.create_fp_to_fp = lambda self, src, dst_type, rounding_mode: cast(self, src, dst_type)
    builder.create_dot = dot
    builder.repaired_by_quire = True


def _is_narrow(dtype) -> bool:
    return dtype == tl.bfloat16 or dtype in _TORCH


def _widen(data, dtype) -> np.ndarray:
    """Return any type as numpy can multiply it; bf16 and fp8 as fp32."""
    if dtype == tl.bfloat16:
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype in _TORCH:
        raw = np.ascontiguousarray(data.view(np.uint8))
        return torch.from_numpy(raw).view(_TORCH[dtype]).float().numpy()
    return data


def _narrow(values, dtype, np_dtype) -> np.ndarray:
    """Round to nearest even."""
    if dtype == tl.bfloat16 or dtype in _TORCH:
        kind = torch.bfloat16 if dtype == tl.bfloat16 else _TORCH[dtype]
        bits = torch.uint16 if dtype == tl.bfloat16 else torch.uint8
        rounded = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).to(kind)
        return rounded.view(bits).numpy()
    return values.astype(np_dtype)
