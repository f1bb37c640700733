"""The flags of `quire eval` beside those of the engine (see `quire.args`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# The value of ``against`` that stands for the same files, expanded.
FP32 = "fp32"


@dataclass(frozen=True, slots=True)
class EvalArgs:
    """What is read, with what it is compared, and how a text is cut."""

    text: str | None = None
    limit_tokens: int | None = None
    limit_tasks: int | None = None
    against: str | None = None
    expand: bool = False
    window: Literal["hf", "llama.cpp"] = "hf"
    context: int | None = None
    stride: int | None = None
    json: bool = False
