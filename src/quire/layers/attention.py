"""Attention of one layer: projections, q/k norm, RoPE, KV store, attention over the pages, output projection."""

from __future__ import annotations

from functools import partial

import torch

from quire.kernels.attention import AttentionShape, attention
from quire.kernels.kv_blocks import KvView
from quire.kernels.lora import AdapterRows
from quire.kernels.quantized_rows import QuantizedRows
from quire.kernels.registry import KernelChoice
from quire.kernels.rope import QkNorm, rope_store
from quire.layers.linear import Linear
from quire.layers.norm import RmsNorm
from quire.layers.step_batch import GroupBatch
from quire.layers.weights import NO_FORMATS, Formats, Place, copy_into, prefixed
from quire.modelspec import AttentionSpec
from quire.weight_format import WeightFormat

CosSin = tuple[torch.Tensor, torch.Tensor]


class Attention:
    """MHA, GQA and MQA with every option of `AttentionSpec` but MLA (`layers.mla`)."""

    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        eps: float,
        dtype: torch.dtype,
        kernels: KernelChoice,
        *,
        norm_plus_one: bool = False,
        formats: Formats = NO_FORMATS,
    ) -> None:
        self._spec = spec
        q, k, v = (
            spec.num_heads * spec.head_dim,
            spec.num_kv_heads * spec.head_dim,
            spec.num_kv_heads * spec.v_head_dim,
        )
        widths = {"q": q, "k": k, "v": v}
        self._qkv = Linear(widths, hidden_size, dtype, kernels, bias=spec.qkv_bias, formats=formats)
        out = spec.num_heads * spec.v_head_dim
        self._o = Linear({"o": hidden_size}, out, dtype, kernels, bias=spec.o_bias, formats=formats)
        self._shape = AttentionShape(spec.num_heads, spec.scale, spec.window, spec.soft_cap)
        self._norms: tuple[RmsNorm, RmsNorm] | None = None
        if spec.qk_norm != "none":
            sizes = (q, k) if spec.qk_norm == "full" else (spec.head_dim, spec.head_dim)
            self._norms = tuple(RmsNorm(n, eps, kernels, plus_one=norm_plus_one) for n in sizes)  # type: ignore[assignment]
        self._sinks = torch.zeros(spec.num_heads) if spec.sinks else None
        self._qk_norm: QkNorm | None = None
        if self._norms is not None:
            weights = self._norms[0].weight, self._norms[1].weight
            self._qk_norm = QkNorm(*weights, eps, over_all=spec.qk_norm == "full")
        self._rope_store = partial(rope_store, backend=kernels.backend("rope_store"))
        self._attend = partial(attention, backend=kernels.backend("attention"))

    def places(self) -> dict[str, Place]:
        found = {**self._qkv.places(), **self._o.places()}
        if self._norms is not None:
            found.update(prefixed("q_norm.", self._norms[0].places()))
            found.update(prefixed("k_norm.", self._norms[1].places()))
        if self._sinks is not None:
            found["sinks"] = copy_into(self._sinks)
        return found

    @property
    def reads(self) -> WeightFormat:
        return self._qkv.reads

    def linears(self) -> tuple[Linear, ...]:
        """Those that an adapter may change."""
        return self._qkv, self._o

    def __call__(
        self,
        x: torch.Tensor | QuantizedRows,
        cos_sin: CosSin | None,
        group: GroupBatch,
        kv: KvView,
        adapters: AdapterRows | None = None,
    ) -> torch.Tensor:
        """``x [num_tokens, hidden_size]`` → the same shape. ``cos_sin`` is None on layers without RoPE."""
        spec = self._spec
        q = self._rope_store(
            self._qkv(x, adapters),
            spec.num_heads,
            cos_sin,
            self._qk_norm,
            kv,
            group.slot_blocks,
            group.slot_offsets,
            interleaved=spec.rope is not None and spec.rope.interleaved,
        )
        out = self._attend(q, kv, group.ragged, self._shape, self._sinks)
        return self._o(out.reshape(x.shape[0], -1), adapters)
