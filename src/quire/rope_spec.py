"""`RopeSpec`: how the heads of a layer are rotated, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding. Frequencies are fixed once per engine from ``max_model_len``."""

    theta: float
    dim: int  # rotated dimensions per head; partial rotary: < head_dim
    kind: Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional"] = "default"
    interleaved: bool = False  # pairs (0,1),(2,3)… (GPT-J), not (i, i + dim/2) (NeoX)
    factor: float = 1.0
    original_max_position: int = 0  # length of the original training (0: max_position_embeddings)
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: correction range in whole dims (gpt-oss: False)
    attention_factor: float = 1.0  # multiplies cos and sin
    mscale: float = 0.0  # yarn (DeepSeek); 0: not given
    mscale_all_dim: float = 0.0
    short_factor: tuple[float, ...] = ()  # longrope, dim/2 values
    long_factor: tuple[float, ...] = ()
    part: float = 1.0  # proportional: the share of the pairs that turns
    query_scale: tuple[float, int] | None = None  # `layers.rope.query_factors`: beta, length
