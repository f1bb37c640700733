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
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from quire.errors import ConfigError

Kind = Literal["plain", "int8", "int4", "fp8"]
BITS: Mapping[Kind, int] = {"int8": 8, "int4": 4, "fp8": 8}
# Group sizes that the kernels support, largest first. int8 and fp8 may also have one scale per row (group None).
GROUPS: Mapping[Kind, tuple[int, ...]] = {"int8": (128, 64, 32, 16), "int4": (128, 64, 32), "fp8": (128,)}
TWO_LEVEL_GROUP = 16  # inputs of int4 that share an integer multiplier
TWO_LEVEL_BLOCK = 64  # inputs stored together: 32 bytes, and 2 of multipliers
# In packed memory: fp32, and fp16 times a power of two per row. The group scales of fp8 are fp32.
ROW_SCALE_BYTES, GROUP_SCALE_BYTES = 4, 2


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """``plain`` is the engine's dtype. ``group`` is a number of inputs; None means one scale per output feature."""

    kind: Kind = "plain"
    group: int | None = None
    has_offset: bool = False

    @property
    def quantized(self) -> bool:
        return self.kind != "plain"

    @property
    def two_level(self) -> bool:
        """Whether it is int4 with integer multipliers of groups under one scale per row."""
        return self.kind == "int4" and self.group == TWO_LEVEL_GROUP

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
            scale_bytes = ROW_SCALE_BYTES if self.kind == "fp8" else GROUP_SCALE_BYTES
            scales, inputs = groups * scale_bytes * per_scale + ROW_SCALE_BYTES, groups * self.group
        return out_features * (-(-inputs * BITS[self.kind] // 8) + scales)

    def __str__(self) -> str:
        if not self.quantized:
            return self.kind
        if self.two_level:
            return f"int4, groups of {self.group} with integer scales"
        size = "a scale a row" if self.group is None else f"groups of {self.group}"
        return f"{self.kind}, {size}" + (" with offsets" if self.has_offset else "")


PLAIN = WeightFormat()


def held_as(kind: Kind, group: int | None, in_features: int, *, has_offset: bool) -> WeightFormat | None:
    """Return the format that holds stored groups of ``group`` inputs (None: the whole row) without loss, or None.

    A group size that no kernel supports is cut into smaller groups with equal scales; int4 that fits none becomes int8.
    """
    group_size = in_features if group is None else group
    if in_features % group_size:
        return None
    if kind != "int4" and group_size == in_features:
        return WeightFormat(kind, None, has_offset)
    for size in GROUPS[kind]:
        if group_size % size == 0:
            return WeightFormat(kind, size, has_offset)
    return held_as("int8", group, in_features, has_offset=has_offset) if kind == "int4" else None


def parse_format(text: str, *, name: str) -> WeightFormat:
    """Return the format of ``int8``, ``int4``, ``fp8``, ``int4-g128`` … or ``none``; int4 alone is ``int4-g16``.

    Raises:
        ConfigError: names the setting ``name``, the value and what is allowed.
    """
    if text in ("none", "fp8"):
        return PLAIN if text == "none" else WeightFormat("fp8")
    match = re.fullmatch(r"(int8|int4)(?:-g([0-9]+))?", text)
    if match is not None:
        kind: Kind = "int8" if match.group(1) == "int8" else "int4"
        group = int(match.group(2)) if match.group(2) else None if kind == "int8" else TWO_LEVEL_GROUP
        format = WeightFormat(kind, group)
        if group is None or group in GROUPS[kind] or format.two_level:
            return format
    allowed = [f"int8-g{size}" for size in sorted(GROUPS["int8"])]
    allowed += [f"int4-g{size}" for size in sorted((*GROUPS["int4"], TWO_LEVEL_GROUP))]
    raise ConfigError(f"{name} = {text!r} must be one of none, int8, int4, fp8, {', '.join(allowed)}")
