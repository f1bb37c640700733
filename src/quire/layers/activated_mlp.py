"""MLPs beside `Mlp`: without a gate (Nemotron, Apertus), or with factors on the gate and the output (Falcon-H1)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.kernels.activation import UNGATED, activated, activated_to_int8
from quire.kernels.lora import AdapterRows
from quire.kernels.pointwise import scale_rows
from quire.kernels.quantized_rows import QuantizedRows
from quire.layers.linear import Linear, completing
from quire.layers.weights import Build, WeightLoader
from quire.modelspec import MlpSpec
from quire.quant.stored import Weight
from quire.weight_format import WeightFormat


class ActivatedMlp:
    """A dense block, or the shared expert of a mixture, of every `MlpSpec`."""

    def __init__(self, hidden_size: int, inter: int, spec: MlpSpec, build: Build) -> None:
        """``inter``: the intermediate size."""
        parts = {"up": inter} if spec.activation in UNGATED else {"gate": inter, "up": inter}
        self._up = Linear(parts, hidden_size, build, bias=spec.bias)
        self._down = completing("down", hidden_size, inter, build, bias=spec.bias)
        self._kind, self._scales = spec.activation, spec.scales or (1.0, 1.0)
        self._alphas = [0.0, 0.0]
        self._activated, self._to_int8 = build.of(activated), build.of(activated_to_int8)
        self._scale_rows = build.of(scale_rows)

    def weight_loaders(self) -> dict[str, WeightLoader]:
        loaders = {**self._up.weight_loaders(), **self._down.weight_loaders()}
        if self._kind == "xielu":
            loaders |= {"alpha_p": self._load_alpha(0, 0.0), "alpha_n": self._load_alpha(1, 0.5)}
        return loaders

    def _load_alpha(self, index: int, least: float) -> Callable[[Weight], None]:
        """An alpha is stored such that ``least + softplus(stored)`` is its value."""

        def load(weight: Weight) -> None:
            assert isinstance(weight, Tensor)
            self._alphas[index] = least + torch.nn.functional.softplus(weight.float()).item()

        return load

    @property
    def reads(self) -> WeightFormat:
        return self._up.reads

    def linears(self) -> tuple[Linear, ...]:
        """Return the linears that an adapter may change."""
        return self._up, self._down

    def __call__(self, x: Tensor | QuantizedRows, adapters: AdapterRows | None = None) -> Tensor:
        """``[num_tokens, hidden_size]`` → the same shape."""
        rows, (scale, of_output), alphas = (
            self._up(x, adapters),
            self._scales,
            (self._alphas[0], self._alphas[1]),
        )
        # As in `Mlp`.
        if self._down.reads.kind not in ("plain", "fp8") and not self._down.gathers:
            y = self._down(self._to_int8(rows, self._kind, self._down.reads.rows, scale, alphas))
        else:
            y = self._down(self._activated(rows, self._kind, scale, alphas), adapters)
        return y if of_output == 1.0 else self._scale_rows(y, of_output)
