"""LayerNorm without a bias (Ba et al. 2016), in fp32 with one rounding at the end: Command R's norm.

The mean is that of a sum in fp64, number i of a row in chain i mod 8, so that native levels have the same one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.norm import MAX_ROW, rms_norm
from quire.kernels.registry import native, op
from quire.kernels.workspace import empty, native_call, rows_at, unit_stride

_CHAINS = 8


@op("centered_norm")
def centered_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x [num_tokens, size]`` → ``(x − mean) / sqrt(variance + eps) · weight`` in x's dtype, ``weight`` in fp32."""
    size = x.shape[-1]
    assert size < MAX_ROW
    values = x.float()
    padded = torch.nn.functional.pad(values.double(), (0, -size % _CHAINS))
    chains = torch.unflatten(padded, -1, (-1, _CHAINS)).cumsum(-2)[..., -1, :]
    pairs = chains[..., ::2] + chains[..., 1::2]
    mean = ((pairs[..., 0] + pairs[..., 1]) + (pairs[..., 2] + pairs[..., 3])) / size
    return rms_norm.reference(values - mean.float().unsqueeze(-1), weight, eps).to(x.dtype)


@op("add_centered_norm")
def add_centered_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, wide: bool = False
) -> tuple[Tensor, Tensor]:
    """Return ``(centered_norm(residual + x), residual + x)``, as `add_rms_norm` does."""
    total = residual.float() + x.float() if wide else residual + x
    return centered_norm.reference(total, weight, eps).to(x.dtype), total


@centered_norm.native()
def native_centered_norm(isa: str, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = unit_stride(x)
    y = empty(*x.shape, dtype=x.dtype)
    native.layer_norm(
        *native_call(isa, x),
        *rows_at(x),
        0,
        0,
        False,
        False,
        weight.data_ptr(),
        eps,
        y.data_ptr(),
        0,
        *x.shape,
    )
    return y


@add_centered_norm.native()
def native_add_centered_norm(
    isa: str, x: Tensor, residual: Tensor, weight: Tensor, eps: float, wide: bool = False
) -> tuple[Tensor, Tensor]:
    x, residual = unit_stride(x), unit_stride(residual)
    y = empty(*x.shape, dtype=x.dtype)
    total = empty(*x.shape, dtype=torch.float32 if wide else x.dtype)
    assert residual.dtype in (x.dtype, total.dtype), (x.dtype, residual.dtype, total.dtype)
    native.layer_norm(
        *native_call(isa, x), *rows_at(x), *rows_at(residual), residual.dtype == torch.bfloat16,
        total.dtype == torch.bfloat16, weight.data_ptr(), eps, y.data_ptr(), total.data_ptr(), *x.shape,
    )  # fmt: skip
    return y, total
