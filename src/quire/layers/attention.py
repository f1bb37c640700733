"""Attention of one layer: projections, q/k norm, RoPE, KV store, attention over the blocks, output projection.

Multi-head latent attention is `layers.latent_attention`. `StepBatch` is what every layer reads of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.kernels.attention import attention
from quire.kernels.attention.batch import AttentionShape, RaggedBatch
from quire.kernels.kv_blocks import KvView
from quire.kernels.lora import AdapterRows
from quire.kernels.quantized_rows import QuantizedRows
from quire.kernels.rope import QkNorm, rope_store
from quire.layers.context import StripedAttention
from quire.layers.linear import Linear, completing
from quire.layers.norm import RmsNorm
from quire.layers.weights import Build, WeightLoader, copy_into, prefixed
from quire.modelspec import AttentionSpec
from quire.weight_format import WeightFormat

if TYPE_CHECKING:
    from quire.kernels.state_pool import StateBatch

CosSin = tuple[Tensor, Tensor]


class Attention:
    """MHA, GQA and MQA with every option of `AttentionSpec` but MLA."""

    def __init__(
        self, spec: AttentionSpec, hidden_size: int, build: Build, in_size: int | None = None
    ) -> None:
        """``in_size``: of its input, where that is not ``hidden_size``."""
        self.spec = spec
        q, k = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        widths = {"q": q, "k": k, "v": spec.num_kv_heads * spec.v_head_dim}
        self.qkv = Linear(widths, in_size or hidden_size, build, bias=spec.qkv_bias)
        out = spec.num_heads * spec.v_head_dim
        # A norm over all heads needs them all on every rank (`parallel.shard`).
        self._o = completing("o", hidden_size, out, build, bias=spec.o_bias, whole=spec.qk_norm == "full")
        self._shape = AttentionShape(spec.num_heads, spec.scale, spec.window, spec.soft_cap)
        self._norms: tuple[RmsNorm, RmsNorm] | None = None
        self.qk_norm: QkNorm | None = None
        if spec.qk_norm != "none":
            sizes = (q, k) if spec.qk_norm == "full" else (spec.head_dim, spec.head_dim)
            q_norm, k_norm = (RmsNorm(n, build, plus_one=build.norm_plus_one) for n in sizes)
            self._norms = q_norm, k_norm
            self.qk_norm = QkNorm(q_norm.weight, k_norm.weight, build.eps, over_all=spec.qk_norm == "full")
        self._sinks = torch.zeros(spec.num_heads) if spec.sinks else None
        # What becomes of the output before its projection: (output, x, adapters) → output.
        self._gate_output: Callable[..., Tensor] | None = None
        self._cp = build.cp
        self._rope_store, self.attend = build.of(rope_store), attention_over_cache(build)

    def weight_loaders(self) -> dict[str, WeightLoader]:
        loaders = {**self.qkv.weight_loaders(), **self._o.weight_loaders()}
        if self._norms is not None:
            loaders.update(prefixed("q_norm.", self._norms[0].weight_loaders()))
            loaders.update(prefixed("k_norm.", self._norms[1].weight_loaders()))
        if self._sinks is not None:
            loaders["sinks"] = copy_into(self._sinks)
        return loaders

    @property
    def reads(self) -> WeightFormat:
        return self.qkv.reads

    def linears(self) -> tuple[Linear, ...]:
        """Return the linears that an adapter may change."""
        return self.qkv, self._o

    def __call__(
        self, x: Tensor | QuantizedRows, cos_sin: CosSin | None, group: GroupBatch, kv: KvView,
        adapters: AdapterRows | None = None,
    ) -> Tensor:  # fmt: skip
        """``x [num_tokens, hidden_size]`` → the same shape. ``cos_sin`` is None on layers without RoPE.

        Where the rows are divided (`layers.context`), ``x`` and the result have this rank's alone.
        """
        spec = self.spec
        interleaved = spec.rope is not None and spec.rope.interleaved
        qkv = self.qkv(x, adapters)
        if group.divided:
            assert self._cp is not None
            qkv = self._cp.gather(qkv, len(group.slot_blocks))
        q = self._rope_store(
            qkv, spec.num_heads, cos_sin, self.qk_norm, kv, group.slot_blocks, group.slot_offsets,
            interleaved,
        )  # fmt: skip
        out = self.attend(q, kv, group.ragged, self._shape, self._sinks, divided=group.divided)
        out = out.reshape(x.shape[0], -1)
        if self._gate_output is not None:
            out = self._gate_output(out, x, adapters)
        return self._o(out, adapters)


def attention_over_cache(build: Build) -> Callable[..., Tensor]:
    """Return attention over the cache: the op, or where ranks share a sequence's cache `StripedAttention`."""
    if build.cp is not None:
        return StripedAttention(build.cp, build.kernels)
    attend = build.of(attention)
    return lambda q, kv, batch, shape, sinks, *, divided: attend(q, kv, batch, shape, sinks)


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """One cache group. slot_mapping = ``slot_blocks`` · block_size + ``slot_offsets``, both ``[num_tokens]`` int64.

    A negative block: the token's position lies on another rank.
    """

    slot_blocks: Tensor
    slot_offsets: Tensor
    ragged: RaggedBatch  # cu_seqlens_q, seq_lens, block_table
    divided: bool = False  # whether ranks divide the rows of the step (`layers.context`)


@dataclass(frozen=True, slots=True)
class AdapterBatch:
    """Which tokens have which adapter: of all tokens, and of those that give logits."""

    tokens: AdapterRows
    logits: AdapterRows
    # Whether `EndSlots` are asked too. A GPU's captured steps have no adapter that changes an end.
    ends: bool = True


@dataclass(frozen=True, slots=True)
class StepBatch:
    """``input_ids, positions [num_tokens]`` and ``logits_indices [num_logits]``: tokens that give logits; all int64.

    ``adapters`` is None in an engine without adapters, ``states`` in a model without recurrent layers.
    """

    input_ids: Tensor
    positions: Tensor
    logits_indices: Tensor
    groups: tuple[GroupBatch, ...]
    adapters: AdapterBatch | None = None
    states: StateBatch | None = None

    @property
    def end_tokens(self) -> AdapterRows | None:
        """Which rows of the embedding adapters may change."""
        return self.adapters.tokens if self.adapters is not None and self.adapters.ends else None

    @property
    def end_logits(self) -> AdapterRows | None:
        """Which rows of logits adapters may change."""
        return self.adapters.logits if self.adapters is not None and self.adapters.ends else None

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    @property
    def divided(self) -> bool:
        return self.groups[0].divided
