"""How weights find their place: every module names the tensors it takes, and a function for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

Place = Callable[[torch.Tensor], None]


def prefixed(prefix: str, places: Mapping[str, Place]) -> dict[str, Place]:
    """Return ``places`` under names that start with ``prefix``."""
    return {prefix + name: place for name, place in places.items()}


def copy_into(target: torch.Tensor) -> Place:
    """Return a place that copies into ``target``, converting to its dtype."""

    def place(tensor: torch.Tensor) -> None:
        assert tensor.shape == target.shape, (tensor.shape, target.shape)
        target.copy_(tensor)

    return place
