"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) in its absorbed form: MQA over the latent.

The cache holds one row per token: ``[c (kv_lora_rank) | k_rope]``, shared by all heads. With W_uk, W_uv the halves of
``kv_b`` for head h, ``q·k = (q_nope W_uk)·c + q_rope·k_rope`` and ``out = (Σ p c) W_uvᵀ``: attention needs no key or
value of its own per head. Prompt chunks take the same path as single tokens, so that they agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from quire.kernels.attention.batch import AttentionShape
from quire.kernels.kv_blocks import KvView
from quire.kernels.linear import HeadMatrices, head_linear, pack_heads
from quire.kernels.lora import AdapterRows
from quire.kernels.output_gate import gate_rows, scale_heads
from quire.kernels.pointwise import copy_heads
from quire.kernels.quantized_rows import QuantizedRows
from quire.kernels.rope import apply_rope, store_kv
from quire.kernels.workspace import empty
from quire.layers.attention import CosSin, GroupBatch, attention_over_cache
from quire.layers.linear import Linear, completing
from quire.layers.norm import RmsNorm
from quire.layers.weights import Build, WeightLoader, prefixed
from quire.modelspec import AttentionSpec
from quire.quant.stored import Weight
from quire.weight_format import PLAIN, WeightFormat

# Epsilon of the norms of the two latents, which no configuration gives.
INNER_EPS = 1e-6


class LatentAttention:
    """MLA with or without a low-rank q, and with or without positions (Kimi Linear has none)."""

    def __init__(self, spec: AttentionSpec, hidden_size: int, build: Build) -> None:
        assert spec.is_mla
        self._spec = spec
        self._dtype = build.dtype
        self._device = torch.get_default_device()
        self._rope_dim = spec.head_dim - spec.qk_nope_head_dim
        assert spec.rope is None or spec.rope.dim == self._rope_dim
        q_width, kv_width = spec.num_heads * spec.head_dim, spec.kv_lora_rank + self._rope_dim
        self._q_b: Linear | None = None
        inner = replace(build, eps=INNER_EPS)
        first = {"q": q_width, "kv_a": kv_width}
        if spec.q_lora_rank:
            first = {"q_a": spec.q_lora_rank, "kv_a": kv_width}
            self._q_b = Linear({"q_b": q_width}, spec.q_lora_rank, build)
            self._q_norm = RmsNorm(spec.q_lora_rank, inner)
        self._q_first = spec.q_lora_rank or q_width
        self._down = Linear(first, hidden_size, build, bias=spec.qkv_bias)
        self._kv_norm = RmsNorm(spec.kv_lora_rank, inner)
        out = spec.num_heads * spec.v_head_dim
        self._o = completing("o", hidden_size, out, build, bias=spec.o_bias)
        self._to_latent: HeadMatrices | None = None  # [num_heads, nope, lora]
        self._from_latent: HeadMatrices | None = None  # [num_heads, lora, v_head_dim]
        self._shape = AttentionShape(spec.num_heads, spec.scale, spec.window, spec.soft_cap)
        self._pack_heads = partial(pack_heads, backend=build.backend("head_linear"))
        self._copy, self._rope = build.of(copy_heads), build.of(apply_rope)
        self._scale_heads = build.of(scale_heads)
        # What becomes of the output before its projection: (output, x, adapters) → output.
        self._gate_output: Callable[..., Tensor] | None = None
        self._cp = build.cp
        self._store, self.attend = build.of(store_kv), attention_over_cache(build)

    def weight_loaders(self) -> dict[str, WeightLoader]:
        loaders = {**self._down.weight_loaders(), **self._o.weight_loaders(), "kv_b.weight": self._load_kv_b}
        loaders.update(prefixed("kv_a_norm.", self._kv_norm.weight_loaders()))
        if self._q_b is not None:
            loaders.update(self._q_b.weight_loaders())
            loaders.update(prefixed("q_a_norm.", self._q_norm.weight_loaders()))
        return loaders

    def _load_kv_b(self, weight: Weight) -> None:
        """``[num_heads · (nope + v_head_dim), lora]`` → the two matrices of each head."""
        assert isinstance(weight, Tensor)  # `weight_plan` never quantizes it
        spec, dtype = self._spec, self._dtype
        heads = torch.unflatten(weight, 0, (spec.num_heads, -1))
        device = self._device
        self._to_latent = self._pack_heads(heads[:, : spec.qk_nope_head_dim].to(device, dtype))
        self._from_latent = self._pack_heads(
            heads[:, spec.qk_nope_head_dim :].transpose(1, 2).to(device, dtype)
        )

    @property
    def reads(self) -> WeightFormat:
        return self._down.reads

    def linears(self) -> tuple[Linear, ...]:
        """Return the linears that an adapter may change."""
        return (self._down, self._o) if self._q_b is None else (self._down, self._q_b, self._o)

    def __call__(
        self, x: Tensor | QuantizedRows, cos_sin: CosSin | None, group: GroupBatch, kv: KvView,
        adapters: AdapterRows | None = None,
    ) -> Tensor:  # fmt: skip
        """As of `Attention`."""
        spec, num_tokens = self._spec, x.shape[0]
        assert (cos_sin is None) == (spec.rope is None)
        if group.divided and cos_sin is not None:
            assert self._cp is not None
            cos_sin = cast("CosSin", tuple(map(self._cp.own, cos_sin)))
        tables = cast("tuple[Tensor, ...]", cos_sin or ())
        assert self._to_latent is not None
        assert self._from_latent is not None
        nope, lora = spec.qk_nope_head_dim, spec.kv_lora_rank
        down = self._down(x, adapters)
        q = down[:, : self._q_first]
        if self._q_b is not None:
            q = self._q_b(self._q_norm(q), adapters)
        if len(tables) > 2:
            q = self._scale_heads(q, tables[2])
        q = torch.unflatten(q, -1, (spec.num_heads, spec.head_dim))
        latent = self._kv_norm(down[:, self._q_first : self._q_first + lora])
        k_rope = down[:, self._q_first + lora :].unsqueeze(1)  # [num_tokens, 1, rope_dim]
        heads, rope_dim, dtype = spec.num_heads, self._rope_dim, q.dtype
        # The rotary parts of the queries, and of the one key.
        both = empty(num_tokens, heads + 1, rope_dim, dtype=dtype, device=q.device)
        self._copy(q[..., nope:], both[:, :heads])
        self._copy(k_rope, both[:, heads:])
        if spec.rope is not None:
            both = self._rope(both, tables[0], tables[1], spec.rope.interleaved)
        key = empty(num_tokens, 1, lora + rope_dim, dtype=dtype, device=q.device)
        self._copy(latent.unsqueeze(1), key[..., :lora])
        self._copy(both[:, heads:], key[..., lora:])
        query = empty(num_tokens, heads, lora + rope_dim, dtype=dtype, device=q.device)
        head_linear(q[..., :nope], self._to_latent, out=query[..., :lora])
        self._copy(both[:, :heads], query[..., lora:])
        if group.divided:
            assert self._cp is not None
            key = self._cp.gather(key.flatten(1), len(group.slot_blocks)).unsqueeze(1)
            query = torch.unflatten(self._cp.gather(query.flatten(1), len(group.slot_blocks)), 1, (heads, -1))
        self._store(key, None, kv, group.slot_blocks, group.slot_offsets)
        # [num_tokens, num_heads, lora]
        out = self.attend(query, kv, group.ragged, self._shape, None, divided=group.divided)
        values = head_linear(out, self._from_latent).view(num_tokens, -1)
        if self._gate_output is not None:
            values = self._gate_output(values, x, adapters)
        return self._o(values, adapters)


class GatedLatentAttention(LatentAttention):
    """MLA whose output has a gate per head (Ling 3): ``o(attention(x) · sigmoid(gate(x)))``."""

    def __init__(self, spec: AttentionSpec, hidden_size: int, build: Build) -> None:
        assert spec.output_gate == "head"
        super().__init__(spec, hidden_size, build)
        self._gate = Linear({"gate": spec.num_heads}, hidden_size, build)
        self._gate_rows, self._gate_output = build.of(gate_rows), self._gated

    def weight_loaders(self) -> dict[str, WeightLoader]:
        return {**super().weight_loaders(), **self._gate.weight_loaders()}

    @property
    def reads(self) -> WeightFormat:
        reads = super().reads
        return reads if reads == self._gate.reads else PLAIN

    def linears(self) -> tuple[Linear, ...]:
        """Return the linears that an adapter may change."""
        return *super().linears(), self._gate

    def _gated(self, out: Tensor, x: Tensor | QuantizedRows, adapters: AdapterRows | None) -> Tensor:
        return self._gate_rows(out, self._gate(x, adapters))


def latent_kind(spec: AttentionSpec) -> type[LatentAttention]:
    """Return the class that computes latent attention of ``spec``."""
    return GatedLatentAttention if spec.output_gate else LatentAttention
