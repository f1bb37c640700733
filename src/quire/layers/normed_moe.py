"""Experts next to a dense block, each with norms of its own (Gemma 4 26B-A4B).

    x = the residual stream                           dense = shared_post_norm(shared(mlp_norm(x)))
    weights, ids = route(router(router_norm(x)))      experts = post_norm(experts(norm(x), weights, ids))

The result is dense + experts; the dense block is the shared expert of `MoeBlock`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.lora import AdapterRows
from quire.kernels.quantized_rows import QuantizedRows
from quire.layers.moe import MoeBlock
from quire.layers.norm import RmsNorm
from quire.layers.weights import Build, WeightLoader, copy_into, prefixed
from quire.modelspec import MlpSpec
from quire.quant.stored import Weight


class NormedMoeBlock(MoeBlock):
    """``see`` has to be called with the residual stream before each call."""

    def __init__(self, hidden_size: int, spec: MlpSpec, build: Build) -> None:
        super().__init__(hidden_size, spec, build)
        self._root = hidden_size**-0.5
        names = ("router_norm", "norm", "post_norm", "shared_post_norm")
        self._norms = {name: RmsNorm(hidden_size, build) for name in names}
        self._factors = torch.zeros(self._moe.num_experts)
        self._stream: tuple[Tensor, Tensor] | None = None

    def weight_loaders(self) -> dict[str, WeightLoader]:
        loaders = {**super().weight_loaders(), "expert_scale": copy_into(self._factors)}
        for name, norm in self._norms.items():
            loaders.update(prefixed(f"{name}.", norm.weight_loaders()))
        loaders["router_norm.weight"] = self._load_router_norm
        return loaders

    def _load_router_norm(self, weight: Weight) -> None:
        assert isinstance(weight, Tensor)
        self._norms["router_norm"].load(weight.float() * self._root)

    def see(self, delta: Tensor, residual: Tensor) -> None:
        """Take the residual stream ``residual + delta`` of the rows that the next call is for."""
        self._stream = delta, residual

    def __call__(self, x: Tensor | QuantizedRows, adapters: AdapterRows | None = None) -> Tensor:
        """``x [num_tokens, hidden_size]``, what the dense block reads → the same shape."""
        assert self._stream is not None
        assert self._shared is not None
        (into, _), (of_router, _) = (self._norms[name].add(*self._stream) for name in ("norm", "router_norm"))
        self._stream = None
        wide = of_router if of_router.dtype == torch.float32 else self._widen(of_router)
        weights, ids = self._route(self._router(wide), self._moe, None, self._factors)
        y = self._experts(into, weights, ids, self._stack)
        if self._tp is not None:
            y = self._tp.all_reduce(y, y.dtype)
        return self._add(
            self._norms["shared_post_norm"](self._shared(x, adapters)), self._norms["post_norm"](y)
        )
