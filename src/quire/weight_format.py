"""How the matrix of a linear is held in memory, and how a quantized one is given to a kernel's packer.

A quantized weight ``w [out, in]`` is integers with a scale, and maybe an offset, for every group of consecutive inputs
of one output feature:

    w[n, k] = scale[n, k // group] · q[n, k] + offset[n, k // group]

One form for what the field writes: symmetric int8 and int4, zero points (offset = −scale · zero: AWQ, GPTQ), minima
(offset = −min: Q4_K, Q5_K of GGUF).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """``plain`` is the engine's dtype. ``group`` is a number of inputs; None is one scale an output feature."""

    kind: Literal["plain", "int8", "int4"] = "plain"
    group: int | None = None
    has_offset: bool = False

    @property
    def quantized(self) -> bool:
        return self.kind != "plain"


PLAIN = WeightFormat()
