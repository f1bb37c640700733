"""exp, log and sum whose bits depend on the row alone.

Library exp and log may use another algorithm in the tail of a vector, and library sums choose their order from the
shape and the threads. These are built from +, -, * and / of IEEE 754, which are correctly rounded everywhere, in a
fixed order. No operation here may be contracted to a fused multiply-add in another implementation.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LN2 = 0.6931471805599453
_SQRT_HALF = 0.7071067811865476
_LOG2_E = 1.44269504088896341
_LN2_HIGH = 0.693359375  # nine bits: k * _LN2_HIGH is exact in float32 for every k that occurs
_LN2_LOW = -2.12194440054690583e-4
_EXP_SERIES = tuple(1.0 / factorial for factorial in (5040.0, 720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0))
_LOG_SERIES = tuple(1.0 / odd for odd in range(23, 0, -2))


def log_f64(x: Tensor) -> Tensor:
    """Natural logarithm of positive, finite float64 values, to about 1e-15 relative, near 1 too.

    ``x = m * 2**k`` with m in [sqrt(1/2), sqrt(2)), ``s = (m - 1) / (m + 1)`` and
    ``log x = k * log 2 + 2 s (1 + s^2/3 + s^4/5 + … + s^22/23)``; the next term is below 1e-18.
    """
    assert x.dtype == torch.float64
    mantissa, exponent = torch.frexp(x)
    small = mantissa < _SQRT_HALF
    mantissa = torch.where(small, mantissa * 2.0, mantissa)
    k = torch.where(small, exponent - 1, exponent).to(torch.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    z = s * s
    series = torch.full_like(z, _LOG_SERIES[0])
    for coefficient in _LOG_SERIES[1:]:
        series.mul_(z).add_(coefficient)
    return k * _LN2 + 2.0 * s * series


def exp_f32(x: Tensor) -> Tensor:
    """exp of float32 values ≤ 0, to about 1e-7 relative; below -87 (and for -inf) it is 0.

    ``x = k log 2 + r`` with |r| ≤ log(2)/2, then the Taylor series of r to the seventh power, then 2**k by its bits.
    """
    assert x.dtype == torch.float32
    zero = x < -87.0
    x = torch.where(zero, torch.zeros_like(x), x)
    k = torch.round(x * _LOG2_E)
    r = (x - k * _LN2_HIGH).sub_(k * _LN2_LOW)
    series = torch.full_like(r, _EXP_SERIES[0])
    for coefficient in _EXP_SERIES[1:]:
        series.mul_(r).add_(coefficient)
    power = ((k.to(torch.int32) + 127) << 23).view(torch.float32)
    return series.mul_(power).masked_fill_(zero, 0.0)


def tree_sum(x: Tensor) -> Tensor:
    """Sum of the last dimension in float64: ``x: [..., n]`` -> ``[...]``.

    Halves are added elementwise until one column is left, so the order depends on n alone.
    """
    total = x.to(torch.float64)
    while (n := total.shape[-1]) > 1:
        half = n // 2
        folded = total[..., :half] + total[..., half : 2 * half]
        total = folded if n % 2 == 0 else torch.cat((folded, total[..., -1:]), dim=-1)
    return total[..., 0]
