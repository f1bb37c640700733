"""Native pointwise ops (csrc/cpu/{pointwise,gated,gather}_kernel.cpp): one call each, the same in every lane."""

from __future__ import annotations

import torch

from quire.kernels.quantized_rows import QuantizedRows, empty_rows, row_words
from quire.kernels.registry import native, register_native
from quire.kernels.threads import num_native_threads
from quire.kernels.workspace import address, empty


@register_native("add_rows")
def add_rows(isa: str, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Both ``[num_tokens, size]``."""
    assert x.dtype == other.dtype, (x.dtype, other.dtype)
    assert x.stride(1) == 1
    assert other.stride(1) == 1
    y = empty(*x.shape, dtype=x.dtype)
    native.add_rows(
        num_native_threads(), isa, x.dtype == torch.bfloat16, x.data_ptr(), x.stride(0), other.data_ptr(),
        other.stride(0), y.data_ptr(), *x.shape,
    )  # fmt: skip
    return y


@register_native("scale_rows")
def scale_rows(isa: str, x: torch.Tensor, scale: float) -> torch.Tensor:
    """``[num_tokens, size]`` → the same."""
    y = empty(*x.shape, dtype=x.dtype)
    _scale(isa, x, scale, 0.0, y)
    return y


@register_native("copy_heads")
def copy_heads(isa: str, x: torch.Tensor, out: torch.Tensor) -> None:
    """``[num_tokens, num_heads, size]`` each."""
    assert x.stride(2) == out.stride(2) == 1
    native.copy_heads(
        num_native_threads(), isa, x.dtype == torch.bfloat16, x.data_ptr(), x.stride(0), x.stride(1),
        out.data_ptr(), out.stride(0), out.stride(1), *x.shape,
    )  # fmt: skip


@register_native("widen_rows")
def widen_rows(isa: str, x: torch.Tensor) -> torch.Tensor:
    """``[num_tokens, size]`` → the same in fp32."""
    assert x.stride(1) == 1
    y = empty(*x.shape, dtype=torch.float32)
    native.widen_rows(
        num_native_threads(), isa, x.dtype == torch.bfloat16, x.data_ptr(), x.stride(0), y.data_ptr(), *x.shape,
    )  # fmt: skip
    return y


@register_native("add_gated_rows")
def add_gated_rows(isa: str, x: torch.Tensor, other: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """``[num_tokens, size]`` each, ``gate [num_tokens, 1]``."""
    assert x.dtype == other.dtype == gate.dtype, (x.dtype, other.dtype, gate.dtype)
    assert x.stride(1) == other.stride(1) == 1
    y = empty(*x.shape, dtype=x.dtype)
    native.add_gated_rows(
        num_native_threads(), isa, x.dtype == torch.bfloat16, x.data_ptr(), x.stride(0), other.data_ptr(),
        other.stride(0), gate.data_ptr(), gate.stride(0), y.data_ptr(), *x.shape,
    )  # fmt: skip
    return y


@register_native("cap_logits")
def cap_logits(isa: str, logits: torch.Tensor, scale: float, cap: float | None) -> torch.Tensor:
    """fp32 ``[num_logits, vocab_size]``, in place."""
    assert logits.is_contiguous()
    _scale(isa, logits, scale, cap or 0.0, logits)
    return logits


def _scale(isa: str, x: torch.Tensor, scale: float, cap: float, y: torch.Tensor) -> None:
    assert x.stride(1) == 1
    native.scale_rows(
        num_native_threads(), isa, x.dtype == torch.bfloat16, x.data_ptr(), x.stride(0), scale, cap, y.data_ptr(),
        *x.shape,
    )  # fmt: skip


GATES = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "swiglu_oai": 3}


@register_native("gated")
def gated(isa: str, gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """``[num_tokens, 2 · size]`` → ``[num_tokens, size]``."""
    y = empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype)
    _over_rows(isa, gate_up, kind, y, None)
    return y


@register_native("gated_to_int8")
def gated_to_int8(isa: str, gate_up: torch.Tensor, kind: str, group: int | None) -> QuantizedRows:
    rows = empty_rows(gate_up.shape[0], gate_up.shape[1] // 2, group, gate_up.dtype)
    _over_rows(isa, gate_up, kind, None, rows)
    return rows


def _over_rows(
    isa: str, gate_up: torch.Tensor, kind: str, y: torch.Tensor | None, rows: QuantizedRows | None
) -> None:
    num_tokens, width = gate_up.shape
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    native.gated(
        num_native_threads(), isa, gate_up.dtype == torch.bfloat16, GATES[kind], gate_up.data_ptr(),
        gate_up.stride(0), address(y), num_tokens, width // 2, *row_words(rows),
    )  # fmt: skip


@register_native("take_rows")
def take_rows(isa: str, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """``table [num_rows, size]``, ``ids [num_tokens]`` → ``[num_tokens, size]``."""
    assert table.stride(1) == 1
    y = empty(ids.shape[0], table.shape[1], dtype=table.dtype)
    _gather(isa, table, table.stride(0), ids, y)
    return y


def _gather(isa: str, table: torch.Tensor, stride: int, ids: torch.Tensor, y: torch.Tensor) -> None:
    assert ids.dtype == torch.int64, ids.dtype
    assert ids.is_contiguous()
    native.gather(
        num_native_threads(), isa, table.dtype == torch.bfloat16, table.data_ptr(), stride, ids.data_ptr(),
        y.data_ptr(), *y.shape,
    )  # fmt: skip
