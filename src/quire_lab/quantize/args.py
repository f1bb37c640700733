"""The flags of `quire quantize` (see `quire.args`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Method = Literal["rtn", "imatrix", "gptq", "awq", "smoothquant", "fp8", "nf4"]
Target = Literal["compressed-tensors", "gptq", "awq", "bnb", "gguf"]
GgufType = Literal["q8_0", "q6_k", "q5_k_m", "q5_k", "q4_k_m", "q4_k", "q4_0", "iq4_xs"]
CALIBRATED = ("imatrix", "gptq", "awq", "smoothquant")


@dataclass(frozen=True, slots=True)
class QuantizeArgs:
    """What becomes of the matrices, on which text, and where it is written."""

    method: Method = "rtn"
    bits: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    activations: bool = False
    rotate: bool = False
    keep: tuple[str, ...] = ()
    calib: str | None = None
    imatrix: str | None = None
    calib_samples: int | None = None
    calib_tokens: int | None = None
    format: Target = "compressed-tensors"
    gguf_type: GgufType | None = None
    out: str | None = None
    revision: str | None = None
    text: str | None = None
    limit_tokens: int | None = None
    max_kl: float | None = None
    json: bool = False
