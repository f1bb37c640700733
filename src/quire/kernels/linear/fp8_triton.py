"""Linears with fp8 weights of a GPU: rows become fp8 as they come, and fp8 is multiplied with fp8 (W8A8).

Data is ``[out, in]``. With a scale a feature the product is `torch._scaled_mm` (cuBLAS, CUTLASS) where the GPU has it
for scales by row and column, else the tiles of `triton_kernels`; with groups, the blocks of 128 x 128 of DeepSeek-V3,
always the tiles: sums of 128 inputs times both scales are added in fp32. A block's scale is held for each of its rows.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton

from quire.kernels.block_sizes import block_sizes
from quire.kernels.linear.fp8_reference import FP8
from quire.kernels.linear.matmul import matmul
from quire.kernels.linear.packed import PackedLinear, QuantizedWeight
from quire.kernels.linear.triton_kernels import rows_to_fp8
from quire.kernels.quantized_rows import QuantizedRows, num_groups
from quire.kernels.registry import GPU_KERNELS, register
from quire.weight_format import WeightFormat

SMALL = 32  # rows: from more on, the tiles for many rows are taken
SCALED_MM = (9, 0)  # compute capability from which torch multiplies with scales by row and column


def quantize_rows(x: torch.Tensor, group: int | None) -> QuantizedRows:
    """``x [num_tokens, in_features]``; ``scale [num_tokens, groups]``."""
    if x.stride(1) != 1:
        x = x.contiguous()
    tokens, size = x.shape
    groups = num_groups(size, group)
    q = torch.empty(tokens, size, dtype=FP8, device=x.device)
    scale = torch.empty(tokens, groups, dtype=torch.float32, device=x.device)
    if tokens:
        block = triton.next_power_of_2(group or size)
        rows_to_fp8[(tokens, groups)](
            x,
            x.stride(0),
            q,
            scale,
            size,
            GROUP=group or size,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
        )
    return QuantizedRows(q, scale, scale.new_empty(tokens, 0, dtype=torch.int32), size, group, x.dtype)


def pack_empty(out_features: int, in_features: int, format: WeightFormat) -> PackedLinear:
    data = torch.zeros(out_features, in_features, dtype=FP8)
    packed = PackedLinear(out_features, in_features, data, scale=torch.ones(out_features))
    if format.group is not None:
        packed.group_scale = torch.zeros(num_groups(in_features, format.group), out_features)
    return packed


def write_rows(packed: PackedLinear, start: int, weight: QuantizedWeight) -> None:
    assert packed.scale is not None
    place = slice(start, start + weight.shape[0])
    packed.data[place].copy_(weight.q)
    if packed.group_scale is None:
        packed.scale[place].copy_(weight.scale[:, 0])
    else:
        packed.group_scale[:, place].copy_(weight.scale.t())


def read_rows(packed: PackedLinear, ids: torch.Tensor) -> torch.Tensor:
    """Rows of the matrix in the model's dtype."""
    assert packed.scale is not None
    values = packed.data.view(torch.int8).index_select(0, ids).view(FP8).float()
    if packed.group_scale is None:
        return (values * packed.scale.index_select(0, ids).unsqueeze(1)).to(packed.dtype)
    scale = packed.group_scale.index_select(1, ids).t().repeat_interleave(packed.format.group or 1, 1)
    return (values * scale[:, : packed.in_features]).to(packed.dtype)


@register("fp8_linear", "triton")
def linear(rows: QuantizedRows, packed: PackedLinear, out: torch.Tensor | None) -> torch.Tensor:
    """``rows`` → ``[num_tokens, out_features]`` in the dtype that they had."""
    if packed.group_scale is None and rows.dtype == torch.bfloat16 and multiplies(packed):
        return scaled_mm(rows, packed, out)
    shape = f"g{packed.format.group or 0}_n{packed.out_features}_k{packed.in_features}"
    sizes = block_sizes("fp8_linear_small" if rows.num_tokens <= SMALL else "fp8_linear_large", shape)
    return matmul(rows.q, packed, rows.dtype, out, sizes, row_scale=rows.scale)


@register("fp8_linear", "invariant")
def linear_invariant(rows: QuantizedRows, packed: PackedLinear, out: torch.Tensor | None) -> torch.Tensor:
    """The same with tiles of one shape and splits that depend on the matrix alone."""
    sizes = block_sizes("matmul_invariant", "all")
    return matmul(rows.q, packed, rows.dtype, out, sizes, row_scale=rows.scale, fixed_splits=True)


def scaled_mm(rows: QuantizedRows, packed: PackedLinear, out: torch.Tensor | None) -> torch.Tensor:
    """torch's own product, to bf16; the bias is fp32 and added behind it."""
    assert packed.scale is not None
    y: torch.Tensor = torch._scaled_mm(
        rows.q, packed.data.t(), scale_a=rows.scale, scale_b=packed.scale.unsqueeze(0), out_dtype=rows.dtype
    )
    if packed.bias is not None:
        y = (y.float() + packed.bias).to(rows.dtype)
    return y if out is None else out.copy_(y)


def multiplies(packed: PackedLinear) -> bool:
    """Whether `torch._scaled_mm` takes the matrix: sizes in sixteens, and a GPU with such scales."""
    in_sixteens = packed.out_features % 16 == 0 and packed.in_features % 16 == 0
    return in_sixteens and packed.data.is_cuda and _capability(packed.data.device) >= SCALED_MM


@lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


for backend in GPU_KERNELS:
    register("quantize_rows_to_fp8", backend)(quantize_rows)
    register("fp8_linear.pack_empty", backend)(pack_empty)
    register("fp8_linear.write_rows", backend)(write_rows)
    register("fp8_linear.read_rows", backend)(read_rows)
