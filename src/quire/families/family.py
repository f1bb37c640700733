"""`Family`: what one file of this package adds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.families.fields import Fields
from quire.families.weights import WeightMap
from quire.modelspec import ModelSpec


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models: how its configuration is read and how its checkpoints name their tensors."""

    name: str  # ModelSpec.family
    architecture: str  # the entry of "architectures" in config.json
    read: Callable[[Fields], ModelSpec]
    weights: Callable[[ModelSpec], WeightMap]
    quantizations: tuple[str, ...] = ()  # values of quantization_config.quant_method that its map can read
