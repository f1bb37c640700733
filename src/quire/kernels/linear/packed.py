"""The weights of one linear, in the layout of the backend that multiplies with them."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.kernels.quantized_rows import num_groups
from quire.kernels.registry import Backend
from quire.weight_format import BITS, NESTED, PLAIN, WeightFormat


def range_of(format: WeightFormat) -> tuple[int, int] | None:
    """Return the smallest and the largest integer of a format; None: numbers are no integers."""
    if format.kind in ("plain", "fp8"):
        return None
    if format.kind in ("iq4", "fp4"):
        return (-127, 113) if format.kind == "iq4" else (-12, 12)
    size = 1 << BITS[format.kind]
    is_unsigned = format.has_offset and (format.kind not in ("int8", "int4") or format.scales == "nested")
    return (0, size - 1) if is_unsigned else (-size // 2, size // 2 - 1)


@dataclass(frozen=True, slots=True)
class NestedScales:
    """Scales and offsets of groups as a file has them: integers, times an fp16 for every `NESTED` inputs."""

    scale: Tensor  # int8 [out, groups]
    outer_scale: Tensor  # fp16 [out, in / 256]
    offset: Tensor | None = None  # uint8 [out, groups]
    outer_offset: Tensor | None = None  # fp16 [out, in / 256]

    def products(self, group: int) -> tuple[Tensor, Tensor | None]:
        """Scales and offsets of groups of ``group`` inputs, fp32 ``[out, groups]``, exactly."""

        def product(inner: Tensor, outer: Tensor) -> Tensor:
            return outer.float().repeat_interleave(NESTED // group, 1)[:, : inner.shape[1]] * inner.float()

        if self.offset is None or self.outer_offset is None:
            return product(self.scale, self.outer_scale), None
        return product(self.scale, self.outer_scale), product(self.offset, self.outer_offset)

    def each(self, change: Callable[[Tensor], Tensor]) -> NestedScales:
        """Return them with ``change`` applied to every tensor."""
        offsets = (None if part is None else change(part) for part in (self.offset, self.outer_offset))
        return NestedScales(change(self.scale), change(self.outer_scale), *offsets)


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
    # Scale and offset are its products, where format.scales is "nested".
    nested: NestedScales | None = None

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
        assert (self.nested is not None) == (self.format.scales == "nested")
        if self.offset is not None:
            assert self.offset.shape == expected, (self.offset.shape, expected)

    @property
    def shape(self) -> torch.Size:
        return self.q.shape

    @classmethod
    def of_nested(cls, format: WeightFormat, q: Tensor, nested: NestedScales) -> QuantizedWeight:
        """Return the matrix whose scales and offsets are the products of ``nested``."""
        assert format.group is not None
        return cls(format, q, *nested.products(format.group), nested=nested)

    def widened(self, format: WeightFormat) -> QuantizedWeight:
        """Return the same numbers in ``held``, which is the format or its `WeightFormat.wide`."""
        if self.format == format:
            return self
        assert format == self.format.wide, (self.format, format)
        q, offset = self.q, self.offset
        if format.kind == "int4" and offset is not None:
            q, offset = q - 8, offset + 8 * self.scale
        return QuantizedWeight(format, q, self.scale, offset)

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
    for index, weight in enumerate(made):
        for name, part in parts.items():
            setattr(weight, name, part[index])
    return made


def powers_of_two(scale: Tensor) -> Tensor:
    """The exponents that hold ``scale``, fp32 powers of two below 2¹²⁷: uint8, 0 for what is below 2⁻¹²⁶."""
    return (scale.view(torch.int32) >> 23).to(torch.uint8)


def held_scales(weight: QuantizedWeight) -> tuple[Tensor, Tensor | None]:
    """Scales and offsets of groups, fp32 ``[out, groups]``, as the native layouts hold them."""
    if weight.format.scales == "nested":
        return weight.scale, weight.offset
    if weight.format.scales == "power":
        return (powers_of_two(weight.scale).int() << 23).view(torch.float32), None
    scale, offset, power = storable_scales(weight.scale, weight.offset)
    power = power.unsqueeze(1)
    return scale.float() * power, None if offset is None else offset.float() * power


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
