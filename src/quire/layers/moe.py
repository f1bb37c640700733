"""Mixture-of-experts block: router, experts, shared expert."""

from __future__ import annotations

from functools import partial

import torch

from quire.kernels.linear import PackedLinear, pack_many, write_bias
from quire.kernels.lora import AdapterRows
from quire.kernels.moe import ExpertStack, experts, route
from quire.kernels.pointwise import add_gated_rows, add_rows, widen_rows
from quire.kernels.quantized_rows import QuantizedRows
from quire.kernels.registry import KernelChoice
from quire.layers.linear import Linear
from quire.layers.mlp import Mlp
from quire.layers.weights import (
    NO_FORMATS,
    Formats,
    Place,
    copy_into,
    matrix_backend,
    prefixed,
    under,
    write_weight,
)
from quire.modelspec import MlpSpec
from quire.quant.stored import StoredMatrix, StoredStack, Weight
from quire.weight_format import PLAIN, WeightFormat


class MoeBlock:
    """Every variant of `MoeSpec`. The router works in fp32 whatever the model's dtype: a choice has no small error."""

    def __init__(
        self,
        hidden_size: int,
        spec: MlpSpec,
        dtype: torch.dtype,
        kernels: KernelChoice,
        *,
        formats: Formats = NO_FORMATS,
    ) -> None:
        moe = spec.moe
        assert moe is not None
        self._moe = moe
        inter = moe.intermediate_size
        self._router = Linear(
            {"router": moe.num_experts}, hidden_size, torch.float32, kernels, bias=moe.router_bias
        )

        def pack(name: str, out_features: int, in_features: int) -> list[PackedLinear]:
            held = formats.get(f"{name}.weight", PLAIN)
            backend = matrix_backend(kernels, held)
            return pack_many(
                moe.num_experts, out_features, in_features, dtype, bias=moe.expert_bias, backend=backend, format=held
            )  # fmt: skip

        self._gate_up = pack("gate", 2 * inter, hidden_size)
        self._down = pack("down", hidden_size, inter)
        self._correction = torch.zeros(moe.num_experts) if moe.correction_bias else None
        self._shared: Mlp | None = None
        if moe.shared_intermediate_size:
            shared = under("shared.", formats)
            self._shared = Mlp(
                hidden_size, moe.shared_intermediate_size, spec.activation, dtype, kernels, formats=shared
            )
        self._shared_gate = (
            Linear({"shared_gate": 1}, hidden_size, dtype, kernels) if moe.shared_gate else None
        )
        self._stack = ExpertStack(self._gate_up, self._down, spec.activation)
        self._route = partial(route, backend=kernels.backend("moe.route"))
        self._experts = partial(experts, backend=kernels.backend("moe.experts"))
        self._widen = partial(widen_rows, backend=kernels.backend("widen_rows"))
        self._add = partial(add_rows, backend=kernels.backend("add_rows"))
        self._add_gated = partial(add_gated_rows, backend=kernels.backend("add_gated_rows"))

    def places(self) -> dict[str, Place]:
        inter = self._moe.intermediate_size
        found = self._router.places()
        for name, packed, start in (
            ("gate", self._gate_up, 0),
            ("up", self._gate_up, inter),
            ("down", self._down, 0),
        ):
            found[f"{name}.weight"] = partial(_write_all, write_weight, packed, start)
            if self._moe.expert_bias:
                found[f"{name}.bias"] = partial(_write_all, write_bias, packed, start)
        if self._correction is not None:
            found["correction_bias"] = copy_into(self._correction)
        if self._shared is not None:
            found.update(prefixed("shared.", self._shared.places()))
        if self._shared_gate is not None:
            found.update(self._shared_gate.places())
        return found

    @property
    def reads(self) -> WeightFormat:
        return PLAIN  # the router wants the rows as they are

    def linears(self) -> tuple[Linear, ...]:
        """Those that an adapter may change."""
        return () if self._shared is None else self._shared.linears()

    def __call__(self, x: torch.Tensor | QuantizedRows, adapters: AdapterRows | None = None) -> torch.Tensor:
        """``[num_tokens, hidden_size]`` → the same shape."""
        assert isinstance(x, torch.Tensor)
        weights, ids = self._route(self._router(self._widen(x)), self._moe, self._correction)
        y = self._experts(x, weights, ids, self._stack)
        if self._shared is None:
            return y
        if self._shared_gate is None:
            return self._add(y, self._shared(x, adapters))
        return self._add_gated(y, self._shared(x, adapters), self._shared_gate(x))


def _write_all(write, packed: list[PackedLinear], start: int, weight: Weight) -> None:  # type: ignore[no-untyped-def]
    """``weight [num_experts, ...]``: one slice for every expert."""
    assert weight.shape[0] == len(packed)
    assert not isinstance(weight, StoredMatrix)
    parts = weight.matrices if isinstance(weight, StoredStack) else weight
    for expert, part in zip(packed, parts, strict=True):
        write(expert, start, part)
