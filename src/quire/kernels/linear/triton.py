"""Plain linears of a GPU: torch's products (cuBLAS), or with a fixed order of summation for the invariant mode.

The fixed order costs where cuBLAS would split the inputs by the number of rows or take another instruction. Here tiles
of 64 and of 128 rows are made of the same products of 64 rows, and the splits of the inputs depend on the matrix alone.
"""

from __future__ import annotations

import torch

from quire.kernels.block_sizes import block_sizes
from quire.kernels.linear.heads import HeadMatrices
from quire.kernels.linear.matmul import matmul
from quire.kernels.linear.packed import PackedLinear
from quire.kernels.registry import GPU_KERNELS, register


def pack_empty(out_features: int, in_features: int, dtype: torch.dtype) -> PackedLinear:
    """Row-major ``[out_features, in_features]``."""
    return PackedLinear(out_features, in_features, torch.empty(out_features, in_features, dtype=dtype))


def write_rows(packed: PackedLinear, start: int, weight: torch.Tensor) -> None:
    packed.data[start : start + weight.shape[0]].copy_(weight)


def read_rows(packed: PackedLinear, ids: torch.Tensor) -> torch.Tensor:
    return packed.data.index_select(0, ids)


for backend in GPU_KERNELS:
    register("linear.pack_empty", backend)(pack_empty)
    register("linear.write_rows", backend)(write_rows)
    register("linear.read_rows", backend)(read_rows)


@register("linear", "triton")
def linear(
    x: torch.Tensor, packed: PackedLinear, out_dtype: torch.dtype, out: torch.Tensor | None
) -> torch.Tensor:
    """``x [num_tokens, in_features]`` → ``[num_tokens, out_features]``."""
    weight = packed.data.t()
    if out_dtype == x.dtype:
        if packed.bias is None:
            return torch.mm(x, weight) if out is None else torch.mm(x, weight, out=out)
        return (
            torch.addmm(packed.bias, x, weight)
            if out is None
            else torch.addmm(packed.bias, x, weight, out=out)
        )
    if x.is_cuda:
        y = torch.mm(x, weight, out_dtype=out_dtype)
    else:
        y = torch.mm(x.to(out_dtype), weight.to(out_dtype))
    if packed.bias is not None:
        y += packed.bias
    return y if out is None else out.copy_(y)


@register("linear", "invariant")
def linear_invariant(
    x: torch.Tensor, packed: PackedLinear, out_dtype: torch.dtype, out: torch.Tensor | None
) -> torch.Tensor:
    """The same; a row's bits do not depend on the other rows."""
    sizes = block_sizes("matmul_invariant", "all")
    if x.shape[0] > sizes["rows"]:
        sizes = {**sizes, "rows": 2 * sizes["rows"], "warps": 2 * sizes["warps"]}
    return matmul(x, packed, out_dtype, out, sizes, fixed_splits=True)


@register("head_linear", "triton")
def head_linear(x: torch.Tensor, heads: HeadMatrices, out: torch.Tensor) -> None:
    """``x [num_tokens, num_heads, in_size]`` → ``out [num_tokens, num_heads, out_size]``: a product over heads."""
    assert isinstance(heads.data, torch.Tensor)
    out.copy_(torch.bmm(x.transpose(0, 1), heads.data).transpose(0, 1))


@register("head_linear", "invariant")
def head_linear_invariant(x: torch.Tensor, heads: HeadMatrices, out: torch.Tensor) -> None:
    """Head by head through the product of fixed order."""
    assert isinstance(heads.data, torch.Tensor)
    for head in range(x.shape[1]):
        weight = heads.data[head].t().contiguous()
        one = PackedLinear(heads.out_size, heads.in_size, weight)
        out[:, head] = linear_invariant(x[:, head], one, x.dtype, None)


for backend in GPU_KERNELS:
    register("head_linear.pack", backend)(torch.Tensor.contiguous)
