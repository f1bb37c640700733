"""Attention whose output has a gate (Qwen3-Next, Qwen3.5, LFM3): ``o(attention(x) · sigmoid(gate(x)))``."""

from __future__ import annotations

from torch import Tensor

from quire.kernels.lora import AdapterRows
from quire.kernels.output_gate import gate_rows
from quire.kernels.quantized_rows import QuantizedRows
from quire.layers.attention import Attention
from quire.layers.linear import Linear
from quire.layers.weights import Build, WeightLoader
from quire.modelspec import AttentionSpec
from quire.weight_format import PLAIN, WeightFormat


class GatedAttention(Attention):
    """As `Attention`, with ``output_gate`` of `AttentionSpec`."""

    def __init__(self, spec: AttentionSpec, hidden_size: int, build: Build) -> None:
        super().__init__(spec, hidden_size, build)
        per_head = spec.output_gate == "head"
        width = spec.num_heads * (1 if per_head else spec.v_head_dim)
        self._gate = Linear({"gate": width}, hidden_size, build, bias=spec.qkv_bias and not per_head)
        self._gate_rows, self._gate_output = build.of(gate_rows), self._gated

    def weight_loaders(self) -> dict[str, WeightLoader]:
        return {**super().weight_loaders(), **self._gate.weight_loaders()}

    @property
    def reads(self) -> WeightFormat:
        reads = super().reads
        return reads if reads == self._gate.reads else PLAIN

    def linears(self) -> tuple[Linear, ...]:
        """Return the linears that an adapter may change."""
        return self.qkv, self._gate, self._o

    def _gated(self, out: Tensor, x: Tensor | QuantizedRows, adapters: AdapterRows | None) -> Tensor:
        return self._gate_rows(out, self._gate(x, adapters))
