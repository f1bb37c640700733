"""The flags of `quire quantize` (see `quire.args`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Method = Literal["rtn"]
Target = Literal["compressed-tensors"]


@dataclass(frozen=True, slots=True)
class QuantizeArgs:
    """What becomes of the matrices, and where it is written."""

    method: Method = "rtn"
    bits: int | None = None
    group_size: int | None = None
    symmetric: bool = True
    keep: tuple[str, ...] = ()
    format: Target = "compressed-tensors"
    out: str | None = None
    revision: str | None = None
    json: bool = False
