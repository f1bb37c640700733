"""The gated MLP, ``down(act(gate(x)) · up(x))``; a mixture of experts is `layers.moe`."""

from __future__ import annotations

from torch import Tensor

from quire.kernels.lora import AdapterRows
from quire.kernels.pointwise import ActivationKind, gated, gated_to_int8
from quire.kernels.quantized_rows import QuantizedRows
from quire.layers.linear import Linear, completing
from quire.layers.weights import Build, WeightLoader
from quire.weight_format import WeightFormat


class Mlp:
    """A dense block, or the shared expert of a mixture."""

    def __init__(
        self, hidden_size: int, inter: int, activation: ActivationKind, build: Build, *, bias: bool = False
    ) -> None:
        """``inter``: the intermediate size."""
        self._gate_up = Linear({"gate": inter, "up": inter}, hidden_size, build, bias=bias)
        self._down = completing("down", hidden_size, inter, build, bias=bias)
        self._activation = activation
        self._gated = build.of(gated)
        self._gated_to_int8 = build.of(gated_to_int8)

    def weight_loaders(self) -> dict[str, WeightLoader]:
        return {**self._gate_up.weight_loaders(), **self._down.weight_loaders()}

    @property
    def reads(self) -> WeightFormat:
        return self._gate_up.reads

    def linears(self) -> tuple[Linear, ...]:
        """Return the linears that an adapter may change."""
        return self._gate_up, self._down

    def __call__(self, x: Tensor | QuantizedRows, adapters: AdapterRows | None = None) -> Tensor:
        """``[num_tokens, hidden_size]`` → the same shape."""
        gate_up = self._gate_up(x, adapters)
        # `linear` itself makes fp8 rows, and int8 rows of what several ranks have parts of.
        if self._down.reads.kind not in ("plain", "fp8") and not self._down.gathers:
            return self._down(self._gated_to_int8(gate_up, self._activation, self._down.reads.rows))
        return self._down(self._gated(gate_up, self._activation), adapters)
