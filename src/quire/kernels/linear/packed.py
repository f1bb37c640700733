"""The weights of one linear, in the layout of the backend that multiplies with them."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.kernels.quantized_rows import num_groups
from quire.kernels.registry import Backend
from quire.weight_format import PLAIN, WeightFormat

RANGE = {"int8": (-128, 127), "int4": (-8, 7)}  # smallest and largest integer


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A quantized matrix on its way into a packed layout; see `quire.weight_format` for the formula.

    The last group of a row may be short. An int8 −128 is allowed too: some checkpoints have it.
    """

    format: WeightFormat
    q: Tensor  # [out, in]: int8 (int4: −8 … 7), or float8_e4m3fn
    scale: Tensor  # fp32 [out, in / group]
    offset: Tensor | None = None  # fp32, the same shape; present where format.has_offset
    # uint8 [out, in / 16] where format.two_level; scale is then [out, 1].
    multiplier: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.format.quantized
        assert self.q.dtype == (torch.float8_e4m3fn if self.format.kind == "fp8" else torch.int8), (
            self.q.dtype
        )
        expected = (self.q.shape[0], num_groups(self.q.shape[1], self.format.group))
        if self.format.two_level:
            assert self.multiplier is not None
            assert self.multiplier.dtype == torch.uint8, self.multiplier.dtype
            assert self.multiplier.shape == expected, (self.multiplier.shape, expected)
            expected = (self.q.shape[0], 1)
        assert self.scale.shape == expected, (self.scale.shape, expected)
        assert (self.offset is not None) == self.format.has_offset
        if self.offset is not None:
            assert self.offset.shape == expected, (self.offset.shape, expected)

    @property
    def shape(self) -> torch.Size:
        return self.q.shape

    @property
    def integers(self) -> Tensor:
        """int8 ``[out, in]``: what scales multiply. Of two levels m · (q + m mod 2), within −112 … 120."""
        if self.multiplier is None:
            return self.q
        group = self.format.group
        assert group is not None
        m = self.multiplier.to(torch.int8).repeat_interleave(group, 1)[:, : self.q.shape[1]]
        return m * (self.q + m % 2)


@dataclass(slots=True)
class PackedLinear:
    """Only the backend reads ``data``, ``scale`` and ``offset``."""

    out_features: int
    in_features: int
    data: Tensor
    # [out_features]: fp32, but the weights' dtype for plain torch backends.
    bias: Tensor | None = None
    backend: Backend = "reference"
    format: WeightFormat = PLAIN
    dtype: torch.dtype = torch.float32  # the model's, returned by `read_rows`
    scale: Tensor | None = None  # fp32
    offset: Tensor | None = None  # fp32
    group_scale: Tensor | None = None  # GPU kernels: fp16, with fp8 fp32
    # The backend's versions of the ops, noted when the matrix is made.
    multiply: Callable[..., Tensor] = field(init=False, repr=False)
    read: Callable[..., Tensor] = field(init=False, repr=False)
    # Whether it multiplies `QuantizedRows`. A GPU multiplies integer weights with plain rows.
    reads_quantized: bool = field(init=False)


@dataclass(frozen=True, slots=True)
class HeadMatrices:
    """A small matrix per head (MLA). Only the backend reads ``data``."""

    num_heads: int
    in_size: int
    out_size: int
    data: Tensor | list[PackedLinear]
    backend: Backend


def stacked(one: PackedLinear, count: int) -> list[PackedLinear]:
    """Return ``count`` matrices like ``one``; each kind of tensor of theirs lies side by side in memory."""
    parts = {
        name: tensor.unsqueeze(0).repeat(count, *(1 for _ in tensor.shape))
        for name in ("data", "bias", "scale", "offset", "group_scale")
        if (tensor := getattr(one, name)) is not None
    }
    made = [copy(one) for _ in range(count)]
    for index, each in enumerate(made):
        for name, part in parts.items():
            setattr(each, name, part[index])
    return made


def storable_scales(scale: Tensor, offset: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """Scales and offsets of groups, fp32 ``[out, groups]``, as fp16 times a power of two of the output feature.

    Returns (fp16 scales, fp16 offsets, fp32 ``[out]`` powers). A scale that is an fp16 or bf16 number is held exactly,
    unless a feature's largest is 2²⁹ times its smallest; other scales are rounded to 11 bits.
    """
    largest = scale.abs().amax(1)
    if offset is not None:
        largest = torch.maximum(largest, offset.abs().amax(1))
    exponent = torch.frexp(largest).exponent - 15  # the largest becomes 16,384 … 32,768
    usable = torch.isfinite(largest) & (largest > 0)
    power = torch.where(usable, torch.ldexp(torch.ones_like(largest), exponent), 1.0)
    inverse = (1.0 / power).unsqueeze(1)
    return (scale * inverse).half(), None if offset is None else (offset * inverse).half(), power
