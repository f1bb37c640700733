"""How the matrix of a linear is held in memory, and the form in which a quantized one is given to a kernel's packer.

A quantized weight ``w [out, in]`` is integers with a scale, and optionally an offset, per group of consecutive inputs
of one output feature ("fp8" has e4m3 numbers in place of integers, for GPUs):

    w[n, k] = scale[n, k // group] · q[n, k] + offset[n, k // group]

This form covers symmetric int8 and int4, zero points (offset = −scale · zero: AWQ, GPTQ) and minima (offset = −min:
Q4_K, Q5_K of GGUF).

int4 in groups of 16 is Quire's own, for CPUs: one scale per output feature and one integer per group, so that a product
is one of int8 with a scale per row, whatever the order of summation (progressive quantization: QServe, Lin et al. 2024,
section 4.1). Odd multipliers have the levels −7 … 8, even ones −8 … 7: a group uses the side of its largest weight.

    w[n, k] = scale[n] · m · (q[n, k] + m mod 2)        m = multiplier[n, k // 16], 0 … 15

Types of GGUF are held at their size in the file (csrc/cpu/unit_layout.h): integers of 2 to 6 bits, from 0 on where
there are offsets, or of a table of 16 (iq4, fp4). A nested scale is an integer times the fp16 of 256 inputs.

Matrices that Quire rounds itself may be rotated before (`kernels.rotation`): w is then the product of each row of the
checkpoint's matrix, in blocks of inputs, with a Hadamard matrix, and so are the rows that it multiplies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["plain", "int8", "int4", "fp8", "int2", "int3", "int5", "int6", "iq4", "fp4"]
Scales = Literal["half", "nested", "power"]
BITS: Mapping[Kind, int] = {
    "int8": 8, "int4": 4, "fp8": 8, "int2": 2, "int3": 3, "int5": 5, "int6": 6, "iq4": 4, "fp4": 4,
}  # fmt: skip
# Group sizes that the kernels support, largest first. int8 and fp8 may also have one scale per row (group None).
GROUPS: Mapping[Kind, tuple[int, ...]] = {
    "int8": (128, 64, 32, 16), "int4": (128, 64, 32), "fp8": (128,),
    "int2": (16,), "int3": (16,), "int5": (32,), "int6": (16,), "iq4": (32,), "fp4": (32,),
}  # fmt: skip
TWO_LEVEL_GROUP = 16  # inputs of int4 that share an integer multiplier
NESTED = 256  # inputs whose nested scales share an fp16
TWO_LEVEL_BLOCK = 64  # inputs stored together: 32 bytes, and 2 of multipliers
ROTATIONS = (64, 32, 16)  # inputs that a rotation may mix
# In packed memory: fp32, and fp16 times a power of two per row. The group scales of fp8 are fp32.
ROW_SCALE_BYTES, GROUP_SCALE_BYTES = 4, 2


class RowFormat(NamedTuple):
    """How the rows that multiply a quantized matrix are rounded. ``block``: inputs that share a scale; None: all."""

    group: int | None = None
    rotation: int | None = None
    block: int | None = None


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """``plain`` is the engine's dtype. ``group`` is a number of inputs; None means one scale per output feature.

    ``rotation``: the inputs of a block that is rotated before it is rounded, one of `ROTATIONS`; None: it is not.
    """

    kind: Kind = "plain"
    group: int | None = None
    has_offset: bool = False
    rotation: int | None = None
    scales: Scales = "half"

    @property
    def quantized(self) -> bool:
        return self.kind != "plain"

    @property
    def two_level(self) -> bool:
        """Whether it is int4 with integer multipliers of groups under one scale per row."""
        return self.kind == "int4" and self.group == TWO_LEVEL_GROUP

    @property
    def wide(self) -> WeightFormat:
        """The format of int4 or int8 with fp16 scales for what only one CPU process holds at the file's size."""
        if self.scales == "half" and self.kind in ("plain", "int8", "int4", "fp8"):
            return self
        return WeightFormat("int4" if self.kind == "int4" else "int8", self.group, self.has_offset)

    @property
    def rows(self) -> RowFormat:
        """The format of the rows that multiply it. Where it has groups they have scales per 32 or 64 inputs."""
        if self.group is None or self.two_level or self.kind == "fp8":
            return RowFormat(self.group, self.rotation)
        return RowFormat(self.group, self.rotation, min(max(self.group, 32), 64))

    def num_bytes(self, out_features: int, in_features: int, dtype_bytes: int) -> int:
        """Return the bytes of a matrix: integers, scales and offsets, or numbers of ``dtype_bytes``."""
        if not self.quantized:
            return out_features * in_features * dtype_bytes
        if self.two_level:
            blocks = -(-in_features // TWO_LEVEL_BLOCK)
            return out_features * (
                blocks * (TWO_LEVEL_BLOCK + TWO_LEVEL_BLOCK // TWO_LEVEL_GROUP) // 2 + ROW_SCALE_BYTES
            )
        per_scale = 1 + self.has_offset
        if self.group is None:
            scales, inputs = ROW_SCALE_BYTES * per_scale, in_features
        else:
            groups = -(-in_features // self.group)
            scale_bytes = per_scale * (ROW_SCALE_BYTES if self.kind == "fp8" else GROUP_SCALE_BYTES)
            if self.scales != "half":
                scale_bytes = 1 if self.kind == "int2" else per_scale  # int2 has both in one byte
            outers = -(-in_features // NESTED) * GROUP_SCALE_BYTES * per_scale * (self.scales == "nested")
            scales, inputs = groups * scale_bytes + outers + ROW_SCALE_BYTES, groups * self.group
        return out_features * (-(-inputs * BITS[self.kind] // 8) + scales)

    def __str__(self) -> str:
        if not self.quantized:
            return self.kind
        if self.two_level:
            return f"int4, groups of {self.group} with integer scales"
        size = "a scale a row" if self.group is None else f"groups of {self.group}"
        nested = {"half": "", "nested": ", nested scales", "power": ", powers of two as scales"}[self.scales]
        return f"{self.kind}, {size}" + (" with offsets" if self.has_offset else "") + nested


PLAIN = WeightFormat()
