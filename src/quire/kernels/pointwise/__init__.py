"""Ops on each row or element by itself: gated activations, look-ups, residual sums, scales, the cap of logits.

The references use operations whose bits do not depend on where an element lies. torch runs an elementwise loop in a
vectorised body and a scalar tail, and for some functions the two differ in the last bit, so that a value's result
depends on its position and on how threads cut the tensor. Measured with torch 2.13 on AVX-512 (fp32): silu, sigmoid,
gelu, exp2 differ; exp, tanh, erf, log, sqrt, rsqrt, division do not. Silu and gelu are therefore written out in terms
of exp, tanh and erf. Everything is computed in fp32 and rounded once.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from quire.kernels.linear.reference import quantize_rows
from quire.kernels.quantized_rows import NO_ROWS, QuantizedRows, empty_rows, row_words
from quire.kernels.registry import native, op
from quire.kernels.threads import num_native_threads
from quire.kernels.workspace import address, empty, heads_at, native_call, rows_at, unit_stride
from quire.weight_format import RowFormat

ActivationKind = Literal["silu", "gelu_tanh", "gelu", "swiglu_oai", "relu2", "xielu"]
GATES: dict[ActivationKind, int] = {
    "silu": 0,
    "gelu_tanh": 1,
    "gelu": 2,
    "swiglu_oai": 3,
}  # in C++ and Triton
_LIMIT = 7.0  # gpt-oss clamps the gate from above, and up on both sides
_ALPHA = 1.702


@op("add_rows")
def add_rows(x: Tensor, other: Tensor) -> Tensor:
    """``x + other``, both ``[num_tokens, size]``, in the dtype of ``other``; ``x`` may be fp32 where that is not."""
    return (x + other).to(other.dtype)


@op("scale_rows")
def scale_rows(x: Tensor, scale: float) -> Tensor:
    """``x · scale`` in fp32, rounded once; ``x [num_tokens, size]``."""
    return x * scale


@op("copy_heads")
def copy_heads(x: Tensor, out: Tensor) -> None:
    """Write ``x [num_tokens, num_heads, size]`` into ``out``, a view of that shape and dtype."""
    assert x.shape == out.shape, (x.shape, out.shape)
    assert x.dtype == out.dtype, (x.dtype, out.dtype)
    out.copy_(x)


@op("widen_rows")
def widen_rows(x: Tensor) -> Tensor:
    """``x [num_tokens, size]`` in fp32."""
    return x.float()


@op("add_gated_rows")
def add_gated_rows(x: Tensor, other: Tensor, gate: Tensor) -> Tensor:
    """``x + other · sigmoid(gate)``, the product rounded to the dtype; all ``[num_tokens, size]``, gate of size 1."""
    return x + (other.float() * sigmoid(gate.float())).to(x.dtype)


@op("cap_logits")
def cap_logits(logits: Tensor, scale: float, cap: float | None) -> Tensor:
    """``cap · tanh(logits · scale / cap)``, without a cap ``logits · scale``; fp32 ``[num_logits, vocab_size]``.

    Written over ``logits``. The cap is Gemma 2's (arXiv:2408.00118, §2), the scale Granite's.
    """
    if scale != 1.0:
        logits *= scale
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def sigmoid(x: Tensor) -> Tensor:
    """``1 / (1 + exp(−x))`` for fp32 ``x``, the same bits at every position."""
    return torch.exp(-x).add_(1.0).reciprocal_()


def gelu_tanh(x: Tensor) -> Tensor:
    """``x/2 · (1 + tanh(√(2/π) · (x + 0.044715·x³)))`` (Hendrycks and Gimpel 2016)."""
    inner = (x * x * x).mul_(0.044715).add_(x).mul_(math.sqrt(2.0 / math.pi))
    return inner.tanh_().add_(1.0).mul_(x).mul_(0.5)


def gelu(x: Tensor) -> Tensor:
    """``x/2 · (1 + erf(x / √2))``."""
    return (x * math.sqrt(0.5)).erf_().add_(1.0).mul_(x).mul_(0.5)


@op("gated")
def gated(gate_up: Tensor, kind: ActivationKind) -> Tensor:
    """``gate_up [num_tokens, 2 · size]`` (gate first, then up) → ``[num_tokens, size]``, contiguous.

    silu: ``g·σ(g)·u`` (Shazeer 2020); gelu: erf or tanh form; swiglu_oai (gpt-oss): with g ≤ 7 and |u| ≤ 7,
    ``g·σ(1.702·g)·(u + 1)``.
    """
    size = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :size].float(), gate_up[..., size:].float()
    if kind == "silu":
        y = sigmoid(gate).mul_(gate).mul_(up)
    elif kind == "gelu_tanh":
        y = gelu_tanh(gate).mul_(up)
    elif kind == "gelu":
        y = gelu(gate).mul_(up)
    else:
        assert kind == "swiglu_oai", kind
        gate, up = gate.clamp(max=_LIMIT), up.clamp(-_LIMIT, _LIMIT)
        y = sigmoid(gate * _ALPHA).mul_(gate).mul_(up + 1.0)
    return y.to(gate_up.dtype)


@op("gated_to_int8")
def gated_to_int8(gate_up: Tensor, kind: ActivationKind, format: RowFormat) -> QuantizedRows:
    """`quantize_rows` of what `gated` makes: the same bits in one pass."""
    return quantize_rows(gated(gate_up, kind), format)


@op("take_rows")
def take_rows(table: Tensor, ids: Tensor) -> Tensor:
    """``table [num_rows, size]``, ``ids [num_tokens]`` int64 → ``[num_tokens, size]``, a copy."""
    return table.index_select(0, ids)


@op("local_ids")
def local_ids(ids: Tensor, own: range, other: int) -> Tensor:
    """``ids − own.start`` where an id is in ``own``, otherwise ``other``; int64 ``[num_tokens]``."""
    return torch.where((ids >= own.start) & (ids < own.stop), ids - own.start, other)


@add_rows.native()
def native_add_rows(isa: str, x: Tensor, other: Tensor) -> Tensor:
    assert x.dtype in (other.dtype, torch.float32), (x.dtype, other.dtype)
    y = empty(*x.shape, dtype=other.dtype)
    is_bf16 = x.dtype == torch.bfloat16
    native.add_rows(*native_call(isa, other), is_bf16, *rows_at(x), *rows_at(other), y.data_ptr(), *x.shape)
    return y


@scale_rows.native()
def native_scale_rows(isa: str, x: Tensor, scale: float) -> Tensor:
    y = empty(*x.shape, dtype=x.dtype)
    native.scale_rows(*native_call(isa, x), *rows_at(x), scale, 0.0, y.data_ptr(), *x.shape)
    return y


@copy_heads.native()
def native_copy_heads(isa: str, x: Tensor, out: Tensor) -> None:
    assert x.shape == out.shape, (x.shape, out.shape)
    assert x.dtype == out.dtype, (x.dtype, out.dtype)
    native.copy_heads(*native_call(isa, x), *heads_at(x), *heads_at(out), *x.shape)


@widen_rows.native()
def native_widen_rows(isa: str, x: Tensor) -> Tensor:
    y = empty(*x.shape, dtype=torch.float32)
    native.widen_rows(*native_call(isa, x), *rows_at(x), y.data_ptr(), *x.shape)
    return y


@add_gated_rows.native()
def native_add_gated_rows(isa: str, x: Tensor, other: Tensor, gate: Tensor) -> Tensor:
    assert x.dtype == other.dtype == gate.dtype, (x.dtype, other.dtype, gate.dtype)
    y = empty(*x.shape, dtype=x.dtype)
    gates = gate.data_ptr(), gate.stride(0)
    native.add_gated_rows(*native_call(isa, x), *rows_at(x), *rows_at(other), *gates, y.data_ptr(), *x.shape)
    return y


@cap_logits.native()
def native_cap_logits(isa: str, logits: Tensor, scale: float, cap: float | None) -> Tensor:
    assert logits.is_contiguous()
    rows = rows_at(logits)
    native.scale_rows(*native_call(isa, logits), *rows, scale, cap or 0.0, logits.data_ptr(), *logits.shape)
    return logits


@gated.native()
def native_gated(isa: str, gate_up: Tensor, kind: ActivationKind) -> Tensor:
    y = empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype)
    write_activated(isa, gate_up, GATES[kind], 2, y, None)
    return y


@gated_to_int8.native()
def native_gated_to_int8(isa: str, gate_up: Tensor, kind: ActivationKind, format: RowFormat) -> QuantizedRows:
    rows = empty_rows(gate_up.shape[0], gate_up.shape[1] // 2, format, gate_up.dtype)
    write_activated(isa, gate_up, GATES[kind], 2, None, rows)
    return rows


def write_activated(
    isa: str, x: Tensor, kind: int, parts: int, y: Tensor | None, rows: QuantizedRows | None,
    factors: tuple[float, float, float] = (1.0, 0.0, 0.0),
) -> None:  # fmt: skip
    """Write what an activation makes of ``x [num_tokens, parts · size]`` into ``y`` or, quantized, into ``rows``."""
    num_tokens, width = x.shape
    x = unit_stride(x)
    native.gated(
        *native_call(isa, x), kind, *rows_at(x), address(y), num_tokens, width // parts, *factors,
        *(NO_ROWS if rows is None else row_words(rows)),
    )  # fmt: skip


@local_ids.native()
def native_local_ids(isa: str, ids: Tensor, own: range, other: int) -> Tensor:
    assert ids.dtype == torch.int64, ids.dtype
    assert ids.is_contiguous()
    y = empty(ids.shape[0], dtype=torch.int64)
    native.local_ids(
        num_native_threads(), ids.data_ptr(), y.data_ptr(), ids.shape[0], own.start, own.stop, other
    )
    return y


@take_rows.native()
def native_take_rows(isa: str, table: Tensor, ids: Tensor) -> Tensor:
    assert ids.dtype == torch.int64, ids.dtype
    assert ids.is_contiguous()
    y = empty(ids.shape[0], table.shape[1], dtype=table.dtype)
    native.gather(*native_call(isa, table), *rows_at(table), ids.data_ptr(), y.data_ptr(), *y.shape)
    return y
