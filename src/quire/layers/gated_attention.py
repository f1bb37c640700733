"""Attention whose output has a gate (Qwen3-Next, Qwen3.5, LFM3): ``o(attention(x) · sigmoid(gate(x)))``."""

from __future__ import annotations

from torch import Tensor

from quire.kernels.kv_blocks import KvView
from quire.kernels.lora import AdapterRows
from quire.kernels.output_gate import gate_rows
from quire.kernels.quantized_rows import QuantizedRows
from quire.layers.attention import Attention, CosSin, GroupBatch
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
        self._gate_rows = build.of(gate_rows)

    def weight_loaders(self) -> dict[str, WeightLoader]:
        return {**super().weight_loaders(), **self._gate.weight_loaders()}

    @property
    def reads(self) -> WeightFormat:
        reads = super().reads
        return reads if reads == self._gate.reads else PLAIN

    def linears(self) -> tuple[Linear, ...]:
        """Return the linears that an adapter may change."""
        return self._qkv, self._gate, self._o

    def __call__(
        self, x: Tensor | QuantizedRows, cos_sin: CosSin | None, group: GroupBatch, kv: KvView,
        adapters: AdapterRows | None = None,
    ) -> Tensor:  # fmt: skip
        """As of `Attention`."""
        spec, divided = self._spec, group.divided
        assert spec.rope is not None
        qkv = self._qkv(x, adapters)
        if divided:
            assert self._cp is not None
            qkv = self._cp.gather(qkv, len(group.slot_blocks))
        q = self._rope_store(
            qkv, spec.num_heads, cos_sin, self._qk_norm, kv, group.slot_blocks, group.slot_offsets,
            spec.rope.interleaved,
        )  # fmt: skip
        out = self._attend(q, kv, group.ragged, self._shape, self._sinks, divided=divided)
        gated = self._gate_rows(out.reshape(x.shape[0], -1), self._gate(x, adapters))
        return self._o(gated, adapters)
