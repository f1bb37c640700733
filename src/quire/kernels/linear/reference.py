"""Exact linear: always the same GEMM, 32 rows by the whole matrix, so a row's bits do not depend on the batch.

A library GEMM promises no order of summation, and picks its code by the shape of the product and the number of
threads. With both fixed the code is fixed; what is left is whether the result of a row depends on where in the tile it
lies or on the other rows. Measured with torch 2.13 (MKL for fp32, oneDNN for bf16), on Zen 4 and on Emerald Rapids:

* it does for fp32 where in_features is odd and out_features < 16 (MKL's edge kernels sum in another order);
* it never did when both are multiples of 32, which is why the matrix is padded with zeros to that;
  zeros add nothing to a sum, so padding changes no result. Real models hardly pad;
* on the Intel CPU a sum over in_features ≥ 1024 is cut between the threads in some shapes, so every product runs
  on one thread, whatever torch's number is.

``tests/kernels/test_linear.py`` checks it on the machine at hand.
"""

from __future__ import annotations

import torch

from quire.kernels.linear.packed import PackedLinear
from quire.kernels.registry import register
from quire.kernels.threads import one_torch_thread

TILE_ROWS = 32
ALIGN = 32  # features


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@register("linear.pack_empty", "reference")
def pack_empty(out_features: int, in_features: int, dtype: torch.dtype) -> PackedLinear:
    """Row-major ``[out_features, in_features]``, both padded with zeros to a multiple of 32."""
    data = torch.empty(round_up(out_features, ALIGN), round_up(in_features, ALIGN), dtype=dtype)
    data[out_features:].zero_()  # only the padding: the rest costs no memory until it is written
    data[:, in_features:].zero_()
    return PackedLinear(out_features, in_features, data)


@register("linear.write_rows", "reference")
def write_rows(packed: PackedLinear, start: int, weight: torch.Tensor) -> None:
    packed.data[start : start + weight.shape[0], : packed.in_features].copy_(weight)


@register("linear.read_rows", "reference")
def read_rows(packed: PackedLinear, ids: torch.Tensor) -> torch.Tensor:
    return packed.data.index_select(0, ids)[:, : packed.in_features]


@register("linear", "reference")
def linear(
    x: torch.Tensor, packed: PackedLinear, out_dtype: torch.dtype, out: torch.Tensor | None
) -> torch.Tensor:
    """``x [num_tokens, in_features]`` → ``[num_tokens, out_features]``, one GEMM for every 32 rows."""
    num_tokens, in_features = x.shape
    num_rows = round_up(num_tokens, TILE_ROWS)
    weight = packed.data.t()
    if num_rows != num_tokens or weight.shape[0] != in_features:
        x = torch.constant_pad_nd(x, (0, weight.shape[0] - in_features, 0, num_rows - num_tokens))
    x = x.contiguous()
    y = x.new_empty(num_rows, weight.shape[1])
    with one_torch_thread():
        for start in range(0, num_rows, TILE_ROWS):
            torch.mm(x[start : start + TILE_ROWS], weight, out=y[start : start + TILE_ROWS])
    y = y[:num_tokens]
    if weight.shape[1] != packed.out_features:
        y = y[:, : packed.out_features]
    y = (y if packed.bias is None else y + packed.bias).to(out_dtype)
    return y if out is None else out.copy_(y)
