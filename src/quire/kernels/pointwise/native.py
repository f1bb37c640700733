"""Native pointwise ops (csrc/cpu/{pointwise,gated,gather}_kernel.cpp): one call each, the same in every lane."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels import pointwise
from quire.kernels.pointwise import GATES, ActivationKind
from quire.kernels.quantized_rows import QuantizedRows, empty_rows, row_words
from quire.kernels.registry import native
from quire.kernels.workspace import address, call_of, empty, heads_of, rows_of, unit_stride


@pointwise.add_rows.native()
def add_rows(isa: str, x: Tensor, other: Tensor) -> Tensor:
    assert x.dtype == other.dtype, (x.dtype, other.dtype)
    y = empty(*x.shape, dtype=x.dtype)
    native.add_rows(*call_of(isa, x), *rows_of(x), *rows_of(other), y.data_ptr(), *x.shape)
    return y


@pointwise.scale_rows.native()
def scale_rows(isa: str, x: Tensor, scale: float) -> Tensor:
    y = empty(*x.shape, dtype=x.dtype)
    native.scale_rows(*call_of(isa, x), *rows_of(x), scale, 0.0, y.data_ptr(), *x.shape)
    return y


@pointwise.copy_heads.native()
def copy_heads(isa: str, x: Tensor, out: Tensor) -> None:
    assert x.shape == out.shape, (x.shape, out.shape)
    assert x.dtype == out.dtype, (x.dtype, out.dtype)
    native.copy_heads(*call_of(isa, x), *heads_of(x), *heads_of(out), *x.shape)


@pointwise.widen_rows.native()
def widen_rows(isa: str, x: Tensor) -> Tensor:
    y = empty(*x.shape, dtype=torch.float32)
    native.widen_rows(*call_of(isa, x), *rows_of(x), y.data_ptr(), *x.shape)
    return y


@pointwise.add_gated_rows.native()
def add_gated_rows(isa: str, x: Tensor, other: Tensor, gate: Tensor) -> Tensor:
    assert x.dtype == other.dtype == gate.dtype, (x.dtype, other.dtype, gate.dtype)
    y = empty(*x.shape, dtype=x.dtype)
    gates = gate.data_ptr(), gate.stride(0)
    native.add_gated_rows(*call_of(isa, x), *rows_of(x), *rows_of(other), *gates, y.data_ptr(), *x.shape)
    return y


@pointwise.cap_logits.native()
def cap_logits(isa: str, logits: Tensor, scale: float, cap: float | None) -> Tensor:
    assert logits.is_contiguous()
    rows = rows_of(logits)
    native.scale_rows(*call_of(isa, logits), *rows, scale, cap or 0.0, logits.data_ptr(), *logits.shape)
    return logits


@pointwise.gated.native()
def gated(isa: str, gate_up: Tensor, kind: ActivationKind) -> Tensor:
    y = empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype)
    _over_rows(isa, gate_up, kind, y, None)
    return y


@pointwise.gated_to_int8.native()
def gated_to_int8(isa: str, gate_up: Tensor, kind: ActivationKind, group: int | None) -> QuantizedRows:
    rows = empty_rows(gate_up.shape[0], gate_up.shape[1] // 2, group, gate_up.dtype)
    _over_rows(isa, gate_up, kind, None, rows)
    return rows


def _over_rows(
    isa: str, gate_up: Tensor, kind: ActivationKind, y: Tensor | None, rows: QuantizedRows | None
) -> None:
    num_tokens, width = gate_up.shape
    gate_up = unit_stride(gate_up)
    native.gated(
        *call_of(isa, gate_up), GATES[kind], *rows_of(gate_up), address(y), num_tokens, width // 2, *row_words(rows)
    )  # fmt: skip


@pointwise.take_rows.native()
def take_rows(isa: str, table: Tensor, ids: Tensor) -> Tensor:
    assert ids.dtype == torch.int64, ids.dtype
    assert ids.is_contiguous()
    y = empty(ids.shape[0], table.shape[1], dtype=table.dtype)
    native.gather(*call_of(isa, table), *rows_of(table), ids.data_ptr(), y.data_ptr(), *y.shape)
    return y
