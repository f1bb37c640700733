"""`Encoder`: the model of an `EncoderSpec`. Whole sequences in, a row of the last layer per token out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from quire.encoder_spec import EncoderSpec
from quire.encoder_weights import has_mlp_bias, kv_heads, layer_norms
from quire.kernels.attention import ALIGN
from quire.kernels.encoder import WholeSequences, activate, encoder_attention, split_heads
from quire.kernels.norm import rms_norm
from quire.kernels.pointwise import gated
from quire.kernels.rope import apply_rope
from quire.layers.attention import CosSin
from quire.layers.encoder_norm import norm_of
from quire.layers.linear import Linear
from quire.layers.norm import RmsNorm
from quire.layers.rope import RopeTable
from quire.layers.weights import Build, WeightLoader, copy_into, prefixed
from quire.models.encoder_heads import ClassifierHead, SparseHead
from quire.modelspec import ModelSpec, weight_shapes
from quire.quant.stored import Weight
from quire.rope_spec import RopeSpec


class EncoderAttention:
    """Attention with its projections; rows see the rows of their own sequence, both ways."""

    def __init__(self, encoder: EncoderSpec, index: int, hidden: int, build: Build) -> None:
        heads, size = encoder.num_heads, encoder.head_dim
        widths = {"q": heads * size, "k": kv_heads(encoder) * size, "v": kv_heads(encoder) * size}
        self._qkv = Linear(widths, hidden, build, bias=encoder.attn_bias)
        self._o = Linear({"o": hidden}, heads * size, build, bias=encoder.attn_bias)
        self._norms = [
            RmsNorm(size, build, plus_one=encoder.norm == "rms_plus_one") for _ in "qk" if encoder.qk_norm
        ]
        self._spec, self._layer, self._eps = encoder, encoder.layers[index], build.eps
        self._scale = size**-0.5 if encoder.scale is None else encoder.scale
        self._attention, self._rotate, self._norm = (
            build.of(encoder_attention),
            build.of(apply_rope),
            build.of(rms_norm),
        )

    def weight_loaders(self) -> dict[str, WeightLoader]:
        loaders = {**self._qkv.weight_loaders(), **self._o.weight_loaders()}
        for part, norm in zip("qk", self._norms, strict=False):
            loaders |= prefixed(f"{part}_norm.", norm.weight_loaders())
        return loaders

    def __call__(
        self,
        x: Tensor,
        sequences: WholeSequences,
        relative: Tensor | None,
        angles: Mapping[RopeSpec, CosSin],
    ) -> Tensor:
        """``[num_rows, hidden_size]`` → the same shape. ``angles``: cos and sin of each row, by their spec."""
        spec, layer = self._spec, self._layer
        qkv = self._qkv(x)
        if self._norms or layer.rope is not None:
            qkv = self._turned(qkv, angles)
        mixed = self._attention(
            qkv, sequences, spec.num_heads, kv_heads(spec), self._scale, layer.window, relative
        )
        return self._o(mixed)

    def _turned(self, qkv: Tensor, angles: Mapping[RopeSpec, CosSin]) -> Tensor:
        """Return ``qkv`` with the heads of q and k normalised and rotated, as far as this layer does so."""
        spec, rope = self._spec, self._layer.rope
        heads = qkv.view(qkv.shape[0], -1, spec.head_dim)
        q, k, v = split_heads(heads, spec.num_heads, kv_heads(spec))
        if self._norms:
            q, k = (norm(part) for norm, part in zip(self._norms, (q, k), strict=True))
        if rope is not None:
            q, k = (self._rotate(part, *angles[rope], rope.interleaved) for part in (q, k))
        return torch.cat((q, k, v), 1).view(qkv.shape)


class EncoderBlock:
    """Attention and MLP with their norms."""

    def __init__(self, encoder: EncoderSpec, index: int, hidden: int, build: Build) -> None:
        inter, mlp = encoder.intermediate_size, build.under("mlp.")
        self._attend = EncoderAttention(encoder, index, hidden, build.under("attn."))
        parts = {"gate": inter, "up": inter} if encoder.gated else {"up": inter}
        self._up = Linear(parts, hidden, mlp, bias=has_mlp_bias(encoder, "up"))
        self._down = Linear({"down": hidden}, inter, mlp, bias=has_mlp_bias(encoder, "down"))
        self._norms = {name: norm_of(encoder, hidden, build) for name in layer_norms(encoder, index)}
        self._spec = encoder
        self._activate, self._gated = build.of(activate), build.of(gated)

    def weight_loaders(self) -> dict[str, WeightLoader]:
        loaders = prefixed("attn.", self._attend.weight_loaders())
        loaders |= prefixed("mlp.", {**self._up.weight_loaders(), **self._down.weight_loaders()})
        for name, norm in self._norms.items():
            loaders |= prefixed(f"{name}.", norm.weight_loaders())
        return loaders

    def __call__(
        self,
        x: Tensor,
        sequences: WholeSequences,
        relative: Tensor | None,
        angles: Mapping[RopeSpec, CosSin],
    ) -> Tensor:
        """``[num_rows, hidden_size]`` → the same shape."""
        norms = self._norms
        if self._spec.norms == "post":
            x = norms["attn_norm"].add(self._attend(x, sequences, relative, angles), x)[0]
            return norms["mlp_norm"].add(self._mlp(x), x)[0]
        rows = norms["attn_norm"](x) if "attn_norm" in norms else x
        rows = self._attend(rows, sequences, relative, angles)
        if "attn_post_norm" in norms:
            rows = norms["attn_post_norm"](rows)
        rows, x = norms["mlp_norm"].add(rows, x)
        rows = self._mlp(rows)
        return x + (norms["mlp_post_norm"](rows) if "mlp_post_norm" in norms else rows)

    def _mlp(self, x: Tensor) -> Tensor:
        up, kind = self._up(x), self._spec.activation
        if self._spec.gated:
            assert kind != "relu"
            return self._down(self._gated(up, kind))
        return self._down(self._activate(up, kind))


class Encoder:
    """The whole model; `load` gives it its weights. ``max_model_len``: of its longest text, in tokens."""

    def __init__(self, spec: ModelSpec, build: Build, max_model_len: int) -> None:
        assert spec.encoder is not None
        self.spec, self.encoder = spec, spec.encoder
        self._dtype, hidden = build.dtype, spec.hidden_size
        shapes = weight_shapes(spec)
        tables = ("embed.weight", "positions.table", "types.table", "relative.table")
        self._tables = {
            name: torch.zeros(shapes[name], dtype=build.dtype) for name in tables if name in shapes
        }
        # transformers rounds the factor to the dtype of the table.
        self._scale = torch.tensor(self.encoder.embedding_scale, dtype=build.dtype).item()
        self._ropes = {
            rope: RopeTable(rope, max_model_len)
            for rope in dict.fromkeys(layer.rope for layer in self.encoder.layers)
            if rope is not None
        }
        names = ("embed_norm",) * self.encoder.embed_norm + ("final_norm",) * (self.encoder.norms != "post")
        self._norms = {name: norm_of(self.encoder, hidden, build) for name in names}
        head = self.encoder.head
        self._head = (
            None if head is None else ClassifierHead(head, self.encoder, hidden, build.under("head."))
        )
        self._sparse = (
            None
            if self.encoder.vocabulary is None
            else SparseHead(self.encoder, hidden, spec.vocab_size, build.under("vocabulary."))
        )
        self._blocks = [
            EncoderBlock(self.encoder, index, hidden, build.under(f"layers.{index}."))
            for index in range(len(self.encoder.layers))
        ]

    @cached_property
    def _loaders(self) -> dict[str, WeightLoader]:
        loaders: dict[str, WeightLoader] = {name: copy_into(table) for name, table in self._tables.items()}
        for name, norm in self._norms.items():
            loaders |= prefixed(f"{name}.", norm.weight_loaders())
        if self._head is not None:
            loaders |= prefixed("head.", self._head.weight_loaders())
        if self._sparse is not None:
            loaders |= prefixed("vocabulary.", self._sparse.weight_loaders())
        for index, block in enumerate(self._blocks):
            loaders |= prefixed(f"layers.{index}.", block.weight_loaders())
        return loaders

    def load(self, weights: Iterable[tuple[str, Weight]]) -> None:
        """Take every weight of the model."""
        missing = set(self._loaders)
        for name, weight in weights:
            self._loaders[name](weight)
            missing.discard(name)
        assert not missing, sorted(missing)

    def __call__(
        self, input_ids: Tensor, positions: Tensor, types: Tensor, sequences: WholeSequences
    ) -> Tensor:
        """``[num_rows]`` each → the last layer's rows ``[num_rows, hidden_size]``.

        ``positions`` count from 0 in each sequence; ``types``: which text of a pair a row belongs to.
        """
        x = self._tables["embed.weight"].index_select(0, input_ids).float()
        if self._scale != 1.0:
            x *= self._scale
        if "positions.table" in self._tables:
            x += (
                self._tables["positions.table"]
                .index_select(0, positions + self.encoder.first_position)
                .float()
            )
        if "types.table" in self._tables:
            types = types if self.encoder.pair_types else torch.zeros_like(types)
            x += self._tables["types.table"].index_select(0, types).float()
        rows = (self._norms["embed_norm"](x) if "embed_norm" in self._norms else x).to(self._dtype)
        angles = {
            rope: (table.cos.index_select(0, positions), table.sin.index_select(0, positions))
            for rope, table in self._ropes.items()
        }
        for block in self._blocks:
            rows = block(rows, sequences, self._relative, angles)
        return self._norms["final_norm"](rows) if "final_norm" in self._norms else rows

    def scores(self, rows: Tensor, *, raw: bool = False) -> Sequence[float]:
        """``rows [num_tokens, hidden_size]`` of one text → a score per label, if ``raw`` its logit."""
        assert self._head is not None, "this model is no classifier"
        return tuple(self._head(rows, raw=raw).tolist())

    def sparse(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """``rows [num_tokens, hidden_size]`` of one text → ids of tokens in order, and the weights above 0."""
        assert self._sparse is not None, "this model has no sparse vectors"
        return self._sparse(rows)

    @cached_property
    def _relative(self) -> Tensor | None:
        """What is added to the scores of each distance: fp32 ``[num_heads, longest, longest]``."""
        table = self._tables.get("relative.table")
        if table is None:
            return None
        positions = torch.arange(-(-self.spec.max_position_embeddings // ALIGN) * ALIGN)
        buckets = distance_buckets(positions - positions[:, None], len(table))
        return table.float()[buckets].permute(2, 0, 1).contiguous()


def distance_buckets(distances: Tensor, num_buckets: int, longest: int = 128) -> Tensor:
    """Return T5's bucket of each distance: half of them before the row; of each half, half for short distances.

    The others grow logarithmically up to ``longest``.
    """
    half = num_buckets // 2
    exact = half // 2
    size = distances.abs()
    far = torch.log(size.float().clamp_min(1.0) / exact) / math.log(longest / exact) * (half - exact)
    far_bucket = (exact + far.long()).clamp_max(half - 1)
    return torch.where(size < exact, size, far_bucket) + half * (distances > 0)
