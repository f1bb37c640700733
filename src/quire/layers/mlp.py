"""Gated MLP: ``down(act(gate(x)) · up(x))``, gate and up in one product."""

from __future__ import annotations

import torch

from quire.kernels.lora import AdapterRows
from quire.kernels.pointwise import ActivationKind, gated, gated_to_int8
from quire.kernels.quantized_rows import QuantizedRows
from quire.kernels.registry import KernelChoice
from quire.layers.linear import Linear
from quire.layers.weights import NO_FORMATS, Formats, Place
from quire.weight_format import WeightFormat


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
        self._to_int8_backend = kernels.backend("gated_to_int8")

    def places(self) -> dict[str, Place]:
        return {**self._gate_up.places(), **self._down.places()}

    @property
    def reads(self) -> WeightFormat:
        return self._gate_up.reads

    def linears(self) -> tuple[Linear, ...]:
        """Those that an adapter may change."""
        return self._gate_up, self._down

    def __call__(self, x: torch.Tensor | QuantizedRows, adapters: AdapterRows | None = None) -> torch.Tensor:
        """``[num_tokens, hidden_size]`` → the same shape."""
        gate_up = self._gate_up(x, adapters)
        if self._down.reads.kind in ("int8", "int4"):  # fp8 rows it makes itself
            group = self._down.reads.group
            return self._down(gated_to_int8(gate_up, self._activation, group, backend=self._to_int8_backend))
        return self._down(gated(gate_up, self._activation, backend=self._gated_backend), adapters)
