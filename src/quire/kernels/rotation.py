"""The rotation of inputs before they are rounded: a Hadamard matrix for each block of them.

An outlier of a row decides the step of its int8 numbers. A rotation spreads it over the inputs of its block, and
rotating the weights by the same matrix leaves the product as it is: x · w = (x R) · (w R) where R Rᵀ = 1 (QuaRot,
Ashkboos et al. 2024; here the blocks are small, and the model needs no change).

Heads of K and V that a cache holds in 8 or 4 bits are rotated too (`rotate_heads`), in blocks of their largest power
of two.

R of a block of n inputs is Sylvester's matrix of ±1 over √n. It is multiplied in log2 n steps: inputs at a distance of
1, 2, 4 … n/2 become their sum (the lower one) and their difference, in fp32, so every backend has the same bits. The
factor 1/√n is split into powers of two, one for rows and one for weights (n = 64: 1/8 each), which are exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROW_FACTORS = {64: 2.0**-3, 32: 2.0**-2, 16: 2.0**-2}
WEIGHT_FACTORS = {64: 2.0**-3, 32: 2.0**-3, 16: 2.0**-2}


def rotate_rows(x: Tensor, block: int | None) -> Tensor:
    """``x [rows, inputs]`` → fp32 of the same shape, its blocks rotated; None: only converted."""
    return x.float() if block is None else _butterflies(x, block) * ROW_FACTORS[block]


def rotate_weights(weight: Tensor, block: int) -> Tensor:
    """``weight [out, in]`` → fp32, so that it multiplies rows of `rotate_rows`. `rotate_rows` of the result: weight."""
    return _butterflies(weight, block) * WEIGHT_FACTORS[block]


def rotate_heads(x: Tensor) -> Tensor:
    """``x [..., head_dim]`` → fp32 of the same shape, times ±1 alone. Applied twice, it multiplies by `head_block`."""
    rows = x.reshape(-1, x.shape[-1])
    return _butterflies(rows, head_block(x.shape[-1])).view(x.shape)


def head_block(head_dim: int) -> int:
    """Return the largest power of two that divides ``head_dim``."""
    return head_dim & -head_dim


def _butterflies(x: Tensor, block: int) -> Tensor:
    assert x.shape[1] % block == 0, (x.shape, block)
    values, distance = x.float().contiguous(), 1
    while distance < block:
        low, high = values.view(len(x), x.shape[1] // (2 * distance), 2, distance).unbind(2)
        values = torch.stack((low + high, low - high), 2).view(x.shape)
        distance *= 2
    return values
