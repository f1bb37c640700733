"""`ModelInfo`: what the API side has to know of the model it serves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.request import SamplingParams


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Names, limits and defaults of the served model. Torch-free."""

    names: tuple[str, ...]  # the first is the one that answers carry
    max_model_len: int  # prompt + output, tokens
    vocab_size: int
    eos_token_ids: tuple[int, ...]  # generation_config.json and the tokenizer together
    generation_defaults: Mapping[str, Any] = field(
        default_factory=dict
    )  # SamplingParams names: temperature, top_p …
    determinism: str = "exact"  # or "batch-dependent" (DESIGN §1.3)

    def sampling(self, **given: Any) -> SamplingParams:
        """Return `SamplingParams` with what was ``given`` over the model's own defaults.

        Raises:
            RequestError: a value that is not allowed, by field.
        """
        return SamplingParams(**{**self.generation_defaults, **given})
