"""Attention that changes q or k behind the rotation: a norm per head (HunYuan), or q times a factor of its position.

The factor (Ministral 3) is 1 + beta · ln(1 + ⌊position / length⌋), rounded to the dtype of q.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, unflatten

from quire.kernels.kv_blocks import KvView
from quire.kernels.lora import AdapterRows
from quire.kernels.output_gate import scale_heads
from quire.kernels.quantized_rows import QuantizedRows
from quire.kernels.rope import apply_rope, store_kv
from quire.layers.attention import Attention, CosSin, GroupBatch
from quire.layers.weights import Build
from quire.modelspec import AttentionSpec


class PostRopeAttention(Attention):
    """As `Attention`, where ``qk_norm`` is "rotated" or the rotary embedding has a ``query_scale``."""

    def __init__(self, spec: AttentionSpec, hidden_size: int, build: Build) -> None:
        super().__init__(spec, hidden_size, build)
        self._rope, self._store = build.of(apply_rope), build.of(store_kv)
        self._scale_heads = build.of(scale_heads)

    def __call__(
        self, x: Tensor | QuantizedRows, cos_sin: CosSin | None, group: GroupBatch, kv: KvView,
        adapters: AdapterRows | None = None,
    ) -> Tensor:  # fmt: skip
        """As of `Attention`; ``cos_sin`` also has the factors of queries, where they have any."""
        spec = self.spec
        assert cos_sin is not None
        assert spec.rope is not None
        qkv = self.qkv(x, adapters)
        if group.divided:
            assert self._cp is not None
            qkv = self._cp.gather(qkv, len(group.slot_blocks))
        cos, sin, *factors = cast("tuple[Tensor, ...]", cos_sin)
        if spec.qk_norm == "rotated":
            q = self._rotated_then_normed(qkv, cos, sin, group, kv)
        else:
            q = self._rope_store(
                qkv, spec.num_heads, (cos, sin), self.qk_norm, kv, group.slot_blocks, group.slot_offsets,
                spec.rope.interleaved,
            )  # fmt: skip
        if factors:
            q = unflatten(self._scale_heads(q.flatten(1), *factors), -1, (spec.num_heads, spec.head_dim))
        out = self.attend(q, kv, group.ragged, self._shape, None, divided=group.divided)
        return self._o(out.reshape(x.shape[0], -1), adapters)

    def _rotated_then_normed(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, group: GroupBatch, kv: KvView
    ) -> Tensor:
        """Store k and v, and return q."""
        spec = self.spec
        assert self._norms is not None
        assert spec.rope is not None
        width = (spec.num_heads + spec.num_kv_heads) * spec.head_dim
        heads = unflatten(qkv[:, :width], -1, (-1, spec.head_dim))
        both = self._rope(heads, cos, sin, spec.rope.interleaved)
        q, k = (
            norm(part)
            for norm, part in zip(
                self._norms, (both[:, : spec.num_heads], both[:, spec.num_heads :]), strict=True
            )
        )
        v = unflatten(qkv[:, width:], -1, (-1, spec.v_head_dim))
        self._store(k, v, kv, group.slot_blocks, group.slot_offsets)
        return q
