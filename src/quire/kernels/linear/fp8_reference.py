"""Linear with fp8 weights (float8_e4m3fn) in torch, the oracle of a GPU's versions. No engine of a CPU takes it.

    y = Σ_g D[g] · s_x[g] · s_w[g] (+ bias), rounded once        D[g] = Σ q_x · q_w over the inputs of group g

Rows are quantized as they come, a scale for each row, or for each row and group where weights have groups: the
largest magnitude becomes 448 (Micikevicius et al. 2022, "FP8 Formats for Deep Learning"; groups of 128 as in
DeepSeek-V3). Sums are in fp64: a product of two e4m3 numbers has at most 8 bits, so every D is exact, in any order.
"""

from __future__ import annotations

import torch

from quire.kernels.linear.packed import PackedLinear, QuantizedWeight
from quire.kernels.quantized_rows import SMALLEST, QuantizedRows, num_groups
from quire.kernels.registry import register
from quire.weight_format import WeightFormat

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of float8_e4m3fn


def scaled_to_fp8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 ``[..., n]`` → fp8 of that shape and a scale for each last dimension, fp32 ``[..., 1]``."""
    largest = values.abs().amax(-1, keepdim=True)  # NaN and infinity come through, and stay visible
    used = ~(largest < SMALLEST)
    inverse = torch.where(used, torch.full_like(largest, LARGEST) / largest, 0.0)
    return (values * inverse).to(FP8), torch.where(used, largest / LARGEST, 0.0)


@register("quantize_rows_to_fp8", "reference")
def quantize_rows(x: torch.Tensor, group: int | None) -> QuantizedRows:
    """``x [num_tokens, in_features]``; ``scale [num_tokens, groups]``."""
    groups = num_groups(x.shape[1], group)
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % (group or 1)))
    q, scale = scaled_to_fp8(torch.unflatten(padded, 1, (groups, -1)))
    no_sums = torch.empty(x.shape[0], 0, dtype=torch.int32, device=x.device)
    return QuantizedRows(
        q.flatten(1)[:, : x.shape[1]], scale.squeeze(-1), no_sums, x.shape[1], group, x.dtype
    )


@register("fp8_linear.pack_empty", "reference")
def pack_empty(out_features: int, in_features: int, format: WeightFormat) -> PackedLinear:
    """fp8 ``[out, in]``, scales fp32 ``[out, groups]``."""
    data = torch.zeros(out_features, in_features, dtype=FP8)
    scale = torch.zeros(out_features, num_groups(in_features, format.group))
    return PackedLinear(out_features, in_features, data, scale=scale)


@register("fp8_linear.write_rows", "reference")
def write_rows(packed: PackedLinear, start: int, weight: QuantizedWeight) -> None:
    assert packed.scale is not None
    place = slice(start, start + weight.shape[0])
    packed.data[place] = weight.q
    packed.scale[place] = weight.scale


@register("fp8_linear.read_rows", "reference")
def read_rows(packed: PackedLinear, ids: torch.Tensor) -> torch.Tensor:
    assert packed.scale is not None
    repeats = packed.format.group or packed.in_features
    scale = packed.scale[ids].repeat_interleave(repeats, 1)[:, : packed.in_features]
    return (packed.data[ids].float() * scale).to(packed.dtype)


@register("fp8_linear", "reference")
def linear(rows: QuantizedRows, packed: PackedLinear, out: torch.Tensor | None) -> torch.Tensor:
    """``rows`` → ``[num_tokens, out_features]`` in the dtype that they had."""
    assert packed.scale is not None
    total = torch.zeros(rows.num_tokens, packed.out_features, dtype=torch.float64)
    width = packed.format.group or packed.in_features
    for g in range(packed.scale.shape[1]):
        part = slice(g * width, (g + 1) * width)
        dots = rows.q[:, part].double() @ packed.data[:, part].double().t()
        total += dots * (rows.scale[:, g : g + 1] * packed.scale[:, g])
    y = (total if packed.bias is None else total + packed.bias).to(rows.dtype)
    return y if out is None else out.copy_(y)
