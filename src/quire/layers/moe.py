"""The mixture of experts: a router, the experts of this rank, and the shared expert."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from quire.kernels.linear import PackedLinear, pack_many, write_bias
from quire.kernels.lora import AdapterRows
from quire.kernels.moe import ExpertPlaces, ExpertStack, experts, route
from quire.kernels.pointwise import add_gated_rows, add_rows, widen_rows
from quire.kernels.quantized_rows import QuantizedRows
from quire.layers.activated_mlp import ActivatedMlp
from quire.layers.linear import Linear
from quire.layers.mlp import Mlp
from quire.layers.weights import NO_FORMATS, Build, MatrixLoader, WeightLoader, copy_into, prefixed
from quire.modelspec import UNGATED, MlpSpec
from quire.quant.stored import Weight
from quire.weight_format import PLAIN, WeightFormat


class MoeBlock:
    """Every variant of `MoeSpec`. The router works in fp32: a wrong choice of experts is no small error."""

    def __init__(self, hidden_size: int, spec: MlpSpec, build: Build) -> None:
        moe = spec.moe
        assert moe is not None
        self._moe = moe
        inter = moe.intermediate_size
        self._tp = build.tp_group
        plain = replace(build, formats=NO_FORMATS)
        wide = replace(plain, dtype=torch.float32)
        self._router = Linear({"router": moe.num_experts}, hidden_size, wide, bias=moe.router_bias)

        self.places: ExpertPlaces | None = None  # None: all experts are on this rank
        num_held = moe.num_experts
        if build.ep_group is not None:
            assert build.tp is not None
            topology = build.tp.shard.topology
            held_by = [topology.experts_of(num_held, rank) for rank in range(topology.ep)]
            self.places = ExpertPlaces(build.ep_group, num_held, [e for experts in held_by for e in experts])
            num_held = self.places.per_rank

        def pack(name: str, out_features: int, in_features: int) -> list[PackedLinear]:
            form = build.held(f"{name}.weight")
            return pack_many(
                num_held, out_features, in_features, build.dtype, bias=moe.expert_bias,
                backend=build.matrix_backend(form), format=form,
            )  # fmt: skip

        self._up_parts = ("up",) if spec.activation in UNGATED else ("gate", "up")
        size = moe.latent_size or hidden_size
        self._gate_up = pack(self._up_parts[0], len(self._up_parts) * inter, size)
        self._down = pack("down", size, inter)
        self._latent: tuple[Linear, Linear] | None = None
        if moe.latent_size:
            self._latent = (
                Linear({"latent_in": size}, hidden_size, build),
                Linear({"latent_out": hidden_size}, size, build),
            )
        self._correction = torch.zeros(moe.num_experts) if moe.correction_bias else None
        self._shared: Mlp | ActivatedMlp | None = None
        if size := moe.shared_intermediate_size:
            of_shared = build.under("shared.")
            if spec.activation in UNGATED:
                self._shared = ActivatedMlp(hidden_size, size, spec, of_shared)
            else:
                self._shared = Mlp(hidden_size, size, spec.activation, of_shared)
        self._shared_gate = Linear({"shared_gate": 1}, hidden_size, plain) if moe.shared_gate else None
        self._stack = ExpertStack(self._gate_up, self._down, spec.activation, self.places)
        self._route, self._experts = build.of(route), build.of(experts)
        self._widen, self._add = build.of(widen_rows), build.of(add_rows)
        self._add_gated = build.of(add_gated_rows)

    @property
    def num_groups(self) -> int:
        """Groups of consecutive experts of which the router chooses some (DeepSeek)."""
        return self._moe.num_groups

    def expert_tensors(self, slot: int) -> list[Tensor]:
        """Return every tensor of the expert in ``slot`` of this rank."""
        tensors = [
            part
            for packed in (self._gate_up[slot], self._down[slot])
            for part in (packed.data, packed.bias, packed.scale, packed.offset)
        ]
        return [part for part in tensors if part is not None]

    def weight_loaders(self) -> dict[str, WeightLoader]:
        inter = self._moe.intermediate_size
        loaders = self._router.weight_loaders()
        places = [(name, self._gate_up, i * inter) for i, name in enumerate(self._up_parts)]
        places.append(("down", self._down, 0))
        for name, packed, start in places:
            loaders[f"{name}.weight"] = MatrixLoader(packed, start, is_stack=True)
            if self._moe.expert_bias:
                loaders[f"{name}.bias"] = partial(_write_biases, packed, start)
        if self._correction is not None:
            loaders["correction_bias"] = copy_into(self._correction)
        if self._shared is not None:
            loaders.update(prefixed("shared.", self._shared.weight_loaders()))
        for linear in (*(self._latent or ()), *([self._shared_gate] if self._shared_gate else ())):
            loaders.update(linear.weight_loaders())
        return loaders

    @property
    def reads(self) -> WeightFormat:
        return PLAIN  # the router needs plain rows

    def linears(self) -> tuple[Linear, ...]:
        """Return the linears that an adapter may change."""
        return () if self._shared is None else self._shared.linears()

    def __call__(self, x: Tensor | QuantizedRows, adapters: AdapterRows | None = None) -> Tensor:
        """``[num_tokens, hidden_size]`` → the same shape."""
        assert isinstance(x, Tensor)
        wide = x if x.dtype == torch.float32 else self._widen(x)
        weights, ids = self._route(self._router(wide), self._moe, self._correction)
        into = x if self._latent is None else self._latent[0](x)
        y = self._experts(into, weights, ids, self._stack)
        if self._tp is not None:
            y = self._tp.all_reduce(y, y.dtype)
        if self._latent is not None:
            y = self._latent[1](y)
        if self._shared is None:
            return y
        if self._shared_gate is None:
            return self._add(y, self._shared(x, adapters))
        return self._add_gated(y, self._shared(x, adapters), self._shared_gate(x))


def block_of(hidden_size: int, spec: MlpSpec, build: Build) -> MoeBlock:
    """Return the block of ``spec``."""
    assert spec.moe is not None
    kind = import_module("quire.layers.normed_moe").NormedMoeBlock if spec.moe.own_norms else MoeBlock
    block: MoeBlock = kind(hidden_size, spec, build)
    return block


def _write_biases(packed: list[PackedLinear], start: int, biases: Weight) -> None:
    """``biases [num_experts, n]``: one slice per expert."""
    assert isinstance(biases, Tensor)
    for expert, bias in zip(packed, biases, strict=True):
        write_bias(expert, start, bias)
