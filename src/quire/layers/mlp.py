"""Gated MLP: ``down(act(gate(x)) · up(x))``, gate and up in one product."""

from __future__ import annotations

import torch

from quire.kernels.activation import ActivationKind, gated
from quire.kernels.registry import KernelChoice
from quire.layers.linear import Linear
from quire.layers.weights import NO_FORMATS, Formats, Place


class Mlp:
    """A dense block, or the shared expert of a mixture."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: ActivationKind,
        dtype: torch.dtype,
        kernels: KernelChoice,
        *,
        bias: bool = False,
        formats: Formats = NO_FORMATS,
    ) -> None:
        inter = intermediate_size
        self._gate_up = Linear(
            {"gate": inter, "up": inter}, hidden_size, dtype, kernels, bias=bias, formats=formats
        )
        self._down = Linear({"down": hidden_size}, inter, dtype, kernels, bias=bias, formats=formats)
        self._activation = activation
        self._gated_backend = kernels.backend("gated")

    def places(self) -> dict[str, Place]:
        return {**self._gate_up.places(), **self._down.places()}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[num_tokens, hidden_size]`` → the same shape."""
        return self._down(gated(self._gate_up(x), self._activation, backend=self._gated_backend))
