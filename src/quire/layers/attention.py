"""Attention of one layer: projections, q/k norm, RoPE, KV store, attention over the pages, output projection."""

from __future__ import annotations

from functools import partial

import torch

from quire.kernels.attention import AttentionShape, attention
from quire.kernels.kv_view import KvView
from quire.kernels.quantized_rows import QuantizedRows
from quire.kernels.registry import KernelChoice
from quire.kernels.rope import apply_rope, store_kv
from quire.layers.linear import Linear
from quire.layers.norm import HeadNorm, RmsNorm
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
        self._widths = (q, k, v)
        widths = {"q": q, "k": k, "v": v}
        self._qkv = Linear(widths, hidden_size, dtype, kernels, bias=spec.qkv_bias, formats=formats)
        out = spec.num_heads * spec.v_head_dim
        self._o = Linear({"o": hidden_size}, out, dtype, kernels, bias=spec.o_bias, formats=formats)
        self._shape = AttentionShape(spec.num_heads, spec.scale, spec.window, spec.soft_cap)
        self._norms: tuple[RmsNorm, RmsNorm] | None = None  # over all of q, all of k
        if spec.qk_norm == "full":
            self._norms = tuple(RmsNorm(n, eps, kernels, plus_one=norm_plus_one) for n in (q, k))  # type: ignore[assignment]
        self._head_norm: HeadNorm | None = None
        if spec.qk_norm == "head":
            heads = {"q_norm": spec.num_heads, "k_norm": spec.num_kv_heads}
            self._head_norm = HeadNorm(heads, spec.head_dim, eps, kernels, plus_one=norm_plus_one)
        self._sinks = torch.zeros(spec.num_heads) if spec.sinks else None
        self._rope = partial(apply_rope, backend=kernels.backend("apply_rope"))
        self._store = partial(store_kv, backend=kernels.backend("store_kv"))
        self._attend = partial(attention, backend=kernels.backend("attention"))

    def places(self) -> dict[str, Place]:
        found = {**self._qkv.places(), **self._o.places()}
        if self._norms is not None:
            found.update(prefixed("q_norm.", self._norms[0].places()))
            found.update(prefixed("k_norm.", self._norms[1].places()))
        if self._head_norm is not None:
            found.update(self._head_norm.places())
        if self._sinks is not None:
            found["sinks"] = copy_into(self._sinks)
        return found

    @property
    def reads(self) -> WeightFormat:
        return self._qkv.reads

    def __call__(
        self, x: torch.Tensor | QuantizedRows, cos_sin: CosSin | None, group: GroupBatch, kv: KvView
    ) -> torch.Tensor:
        """``x [num_tokens, hidden_size]`` → the same shape. ``cos_sin`` is None on layers without RoPE."""
        spec, num_tokens = self._spec, x.shape[0]
        q_width, k_width, _ = self._widths
        qkv = self._qkv(x)
        if self._norms is not None:
            q = self._rotate(self._norms[0](qkv[:, :q_width]), cos_sin)
            k = self._rotate(self._norms[1](qkv[:, q_width : q_width + k_width]), cos_sin)
        else:
            heads = self._rotate(qkv[:, : q_width + k_width], cos_sin)
            q, k = heads[:, : spec.num_heads], heads[:, spec.num_heads :]
        v = torch.unflatten(qkv[:, q_width + k_width :], -1, (-1, spec.v_head_dim))
        self._store(k, v, kv, group.slot_blocks, group.slot_offsets)
        out = self._attend(q, kv, group.ragged, self._shape, self._sinks)
        return self._o(out.reshape(num_tokens, -1))

    def _rotate(self, x: torch.Tensor, cos_sin: CosSin | None) -> torch.Tensor:
        """``x [num_tokens, heads of q, k or both · head_dim]`` → ``[num_tokens, heads, head_dim]``, normalised."""
        heads = torch.unflatten(x, -1, (-1, self._spec.head_dim))
        if self._head_norm is not None:
            heads = self._head_norm(heads)
        if cos_sin is None:
            return heads
        assert self._spec.rope is not None
        return self._rope(heads, *cos_sin, interleaved=self._spec.rope.interleaved)
