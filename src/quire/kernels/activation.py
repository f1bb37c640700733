"""Activations beside those of `kernels.pointwise`: of blocks without a gate, and with a factor on the gate."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quire.kernels.linear.reference import quantize_rows
from quire.kernels.pointwise import GATES, ActivationKind, gated, write_activated
from quire.kernels.quantized_rows import QuantizedRows, empty_rows
from quire.kernels.registry import op
from quire.kernels.workspace import empty
from quire.weight_format import RowFormat

# Numbers of the kinds in C++. Those of `UNGATED` work on the rows of up alone.
UNGATED: Mapping[ActivationKind, int] = {"relu2": 4, "xielu": 5}
ALL_KINDS: Mapping[ActivationKind, int] = {**GATES, **UNGATED}
# Of xielu, for positive and for negative numbers.
Alphas = tuple[float, float]


def num_parts(kind: ActivationKind) -> int:
    """Return the columns of the rows per column of the result."""
    return 1 if kind in UNGATED else 2


@op("activated")
def activated(x: Tensor, kind: ActivationKind, scale: float = 1.0, alphas: Alphas = (0.0, 0.0)) -> Tensor:
    """``x [num_tokens, parts · size]`` → ``[num_tokens, size]``, contiguous, in its dtype.

    relu2 (Nemotron): ``max(x, 0)²``. xielu (Apertus, arXiv:2411.13010) with alphas p and n: ``p·x² + x/2`` where x is
    positive, else ``n · (exp(min(x, −10⁻⁶)) − 1 − x) + x/2``. The others are `gated`, with the gate times ``scale``
    first (Falcon-H1).
    """
    if kind not in UNGATED:
        if scale == 1.0:
            return gated(x, kind)
        size = x.shape[1] // 2
        return gated(torch.cat((x[:, :size].float() * scale, x[:, size:].float()), dim=1), kind).to(x.dtype)
    wide = x.float()
    if kind == "relu2":
        return wide.clamp(min=0.0).square().to(x.dtype)
    negative = (torch.expm1(wide.clamp(max=-1e-6)) - wide) * alphas[1]
    return (torch.where(wide > 0, wide * wide * alphas[0], negative) + wide * 0.5).to(x.dtype)


@op("activated_to_int8")
def activated_to_int8(
    x: Tensor, kind: ActivationKind, format: RowFormat, scale: float = 1.0, alphas: Alphas = (0.0, 0.0)
) -> QuantizedRows:
    """`quantize_rows` of what `activated` makes: the same bits in one pass."""
    return quantize_rows(activated(x, kind, scale, alphas), format)


@activated.native()
def native_activated(
    isa: str, x: Tensor, kind: ActivationKind, scale: float = 1.0, alphas: Alphas = (0.0, 0.0)
) -> Tensor:
    y = empty(x.shape[0], x.shape[1] // num_parts(kind), dtype=x.dtype)
    write_activated(isa, x, ALL_KINDS[kind], num_parts(kind), y, None, (scale, *alphas))
    return y


@activated_to_int8.native()
def native_activated_to_int8(
    isa: str,
    x: Tensor,
    kind: ActivationKind,
    format: RowFormat,
    scale: float = 1.0,
    alphas: Alphas = (0.0, 0.0),
) -> QuantizedRows:
    rows = empty_rows(x.shape[0], x.shape[1] // num_parts(kind), format, x.dtype)
    write_activated(isa, x, ALL_KINDS[kind], num_parts(kind), None, rows, (scale, *alphas))
    return rows
