"""Attention of Gemma 4: V has a norm without a weight and may be K's projection; a layer may read another's cache.

A layer that reads the K and V of an earlier layer projects queries alone and stores nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.attention.batch import AttentionShape
from quire.kernels.kv_blocks import KvView
from quire.kernels.lora import AdapterRows
from quire.kernels.norm import rms_norm
from quire.kernels.quantized_rows import QuantizedRows
from quire.kernels.rope import QkNorm, apply_rope, rope_store
from quire.layers.attention import CosSin, GroupBatch, attention_over_cache
from quire.layers.linear import Linear, completing
from quire.layers.norm import RmsNorm
from quire.layers.weights import Build, WeightLoader, prefixed
from quire.modelspec import AttentionSpec
from quire.weight_format import WeightFormat


class SharedAttention:
    """As `quire.layers.attention.Attention`, with ``v_norm``, ``v_from_k`` and ``kv_layer`` of `AttentionSpec`."""

    def __init__(self, spec: AttentionSpec, hidden_size: int, build: Build) -> None:
        assert spec.qk_norm == "head"
        assert spec.rope is not None
        self.spec, self._eps = spec, build.eps
        self._q_width, self._k_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        widths = {"q": self._q_width}
        self._q_norm = RmsNorm(spec.head_dim, build)
        self._k_norm: RmsNorm | None = None
        if spec.kv_layer is None:
            widths["k"] = self._k_width
            self._k_norm = RmsNorm(spec.head_dim, build)
            if not spec.v_from_k:
                widths["v"] = spec.num_kv_heads * spec.v_head_dim
        self.qkv = Linear(widths, hidden_size, build, bias=spec.qkv_bias)
        self._o = completing("o", hidden_size, spec.num_heads * spec.v_head_dim, build, bias=spec.o_bias)
        self._shape = AttentionShape(spec.num_heads, spec.scale, spec.window, spec.soft_cap)
        self._ones = torch.ones(spec.v_head_dim)
        self._rms_norm, self._rope = build.of(rms_norm), build.of(apply_rope)
        self._rope_store, self.attend = build.of(rope_store), attention_over_cache(build)
        self._cp = build.cp

    def weight_loaders(self) -> dict[str, WeightLoader]:
        loaders = {**self.qkv.weight_loaders(), **self._o.weight_loaders()}
        loaders.update(prefixed("q_norm.", self._q_norm.weight_loaders()))
        if self._k_norm is not None:
            loaders.update(prefixed("k_norm.", self._k_norm.weight_loaders()))
        return loaders

    @property
    def reads(self) -> WeightFormat:
        return self.qkv.reads

    @property
    def qk_norm(self) -> QkNorm | None:
        """The norms of q and k; None: it stores no keys."""
        if self._k_norm is None:
            return None
        return QkNorm(self._q_norm.weight, self._k_norm.weight, self._eps, over_all=False)

    def linears(self) -> tuple[Linear, ...]:
        """Return the linears that an adapter may change."""
        return self.qkv, self._o

    def __call__(
        self, x: Tensor | QuantizedRows, cos_sin: CosSin | None, group: GroupBatch, kv: KvView,
        adapters: AdapterRows | None = None,
    ) -> Tensor:  # fmt: skip
        """As of `Attention`; ``kv`` is the cache of the layer that it reads."""
        assert cos_sin is not None
        qkv = self.qkv(x, adapters)
        if group.divided:
            assert self._cp is not None
            qkv = self._cp.gather(qkv, len(group.slot_blocks))
        if self._k_norm is None:
            heads = torch.unflatten(qkv, -1, (self.spec.num_heads, self.spec.head_dim))
            q = self._rope(self._q_norm(heads), *cos_sin, False)
        else:
            q = self._rope_store(
                self._with_normed_v(qkv), self.spec.num_heads, cos_sin, self.qk_norm, kv, group.slot_blocks,
                group.slot_offsets, False,
            )  # fmt: skip
        out = self.attend(q, kv, group.ragged, self._shape, None, divided=group.divided)
        return self._o(out.reshape(x.shape[0], -1), adapters)

    def _with_normed_v(self, qkv: Tensor) -> Tensor:
        """``[q | k | v]`` or ``[q | k]`` → ``[q | k | norm(v)]``."""
        end = self._q_width + self._k_width
        v = qkv[:, self._q_width : end] if self.spec.v_from_k else qkv[:, end:]
        heads = torch.unflatten(v, -1, (self.spec.num_kv_heads, self.spec.v_head_dim))
        normed = self._rms_norm(heads, self._ones, self._eps).flatten(1)
        return torch.cat((qkv[:, :end], normed), dim=1)
