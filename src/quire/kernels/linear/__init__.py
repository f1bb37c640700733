"""``y = x · Wᵀ + b``. The weights are held in the layout that the backend wants, written row range by row range.

    packed = pack_empty(out_features, in_features, dtype, bias=..., backend=...)
    write_rows(packed, start, weight[n, in_features])     # several matrices fused into one: q, k, v; gate, up
    y = linear(x, packed)                                 # [num_tokens, out_features]
    rows = read_rows(packed, ids)                         # [len(ids), in_features], for tied embeddings

Writing in ranges lets a loader build fused matrices tensor by tensor, without a second copy of the model.
"""

from __future__ import annotations

import torch

from quire.kernels.linear import native, reference  # noqa: F401  registers them
from quire.kernels.linear.packed import PackedLinear
from quire.kernels.registry import Backend, find

__all__ = [
    "PackedLinear",
    "head_linear",
    "linear",
    "pack_empty",
    "pack_heads",
    "read_rows",
    "write_bias",
    "write_rows",
]


def pack_empty(
    out_features: int, in_features: int, dtype: torch.dtype, *, bias: bool, backend: Backend
) -> PackedLinear:
    """Return a matrix in the layout of ``backend``, to be filled with `write_rows`."""
    packed: PackedLinear = find("linear.pack_empty", backend)(out_features, in_features, dtype)
    packed.backend = backend
    if bias:
        packed.bias = torch.zeros(out_features, dtype=dtype)
    return packed


def write_rows(packed: PackedLinear, start: int, weight: torch.Tensor) -> None:
    """Put ``weight [n, in_features]`` at the output features ``start … start + n − 1``."""
    assert weight.dim() == 2
    assert weight.shape[1] == packed.in_features, (weight.shape, packed.in_features)
    assert 0 <= start <= start + weight.shape[0] <= packed.out_features
    find("linear.write_rows", packed.backend)(packed, start, weight)


def write_bias(packed: PackedLinear, start: int, bias: torch.Tensor) -> None:
    """Put ``bias [n]`` at the output features ``start … start + n − 1``."""
    assert packed.bias is not None
    packed.bias[start : start + bias.shape[0]].copy_(bias)


def read_rows(packed: PackedLinear, ids: torch.Tensor) -> torch.Tensor:
    """Return rows of the matrix, ``[len(ids), in_features]``: the embedding look-up of a tied output matrix."""
    rows: torch.Tensor = find("linear.read_rows", packed.backend)(packed, ids)
    return rows


def linear(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """``x [num_tokens, in_features]`` → ``[num_tokens, out_features]`` in x's dtype (rows may be strided)."""
    y: torch.Tensor = find("linear", packed.backend)(x, packed)
    return y


def pack_heads(weight: torch.Tensor) -> torch.Tensor:
    """``weight [num_heads, in_size, out_size]`` → the layout that `head_linear` multiplies with."""
    return reference.pack_heads(weight)


def head_linear(
    x: torch.Tensor, packed: torch.Tensor, out_size: int, *, backend: Backend = "reference"
) -> torch.Tensor:
    """A small matrix for every head (MLA): ``x [num_tokens, num_heads, in_size]`` → ``[..., out_size]``."""
    y: torch.Tensor = find("head_linear", backend)(x, packed, out_size)
    return y
