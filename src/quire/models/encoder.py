"""`Encoder`: the model of an `EncoderSpec`. Whole sequences in, a row of the last layer per token out."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property

import torch
from torch import Tensor

from quire.encoder_spec import EncoderLayer, EncoderSpec
from quire.kernels.attention import ALIGN
from quire.kernels.encoder import WholeSequences, activate, add_layer_norm, encoder_attention, layer_norm
from quire.kernels.pointwise import gated
from quire.layers.linear import Linear
from quire.layers.weights import Build, WeightLoader, copy_into, prefixed
from quire.modelspec import ModelSpec, weight_shapes
from quire.quant.stored import Weight


class LayerNorm:
    """LayerNorm with its weight, and a bias where the model has one; both are held in fp32."""

    def __init__(self, size: int, build: Build, *, bias: bool) -> None:
        self.weight = torch.ones(size)
        self.bias = torch.zeros(size) if bias else None
        self._eps = build.eps
        self._norm, self._add = build.of(layer_norm), build.of(add_layer_norm)

    def weight_loaders(self) -> dict[str, WeightLoader]:
        found = {"weight": copy_into(self.weight)}
        return found if self.bias is None else {**found, "bias": copy_into(self.bias)}

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise each row; same shape and dtype."""
        return self._norm(x, self.weight, self.bias, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(norm(residual + x), residual + x)``."""
        return self._add(x, residual, self.weight, self.bias, self._eps)


class EncoderBlock:
    """Attention and MLP with their norms."""

    def __init__(self, layer: EncoderLayer, encoder: EncoderSpec, hidden: int, build: Build) -> None:
        width, inter = encoder.num_heads * encoder.head_dim, encoder.intermediate_size
        attn, mlp = build.under("attn."), build.under("mlp.")
        self._qkv = Linear(dict.fromkeys("qkv", width), hidden, attn, bias=encoder.attn_bias)
        self._o = Linear({"o": hidden}, width, attn, bias=encoder.attn_bias)
        parts = {"gate": inter, "up": inter} if encoder.gated else {"up": inter}
        self._up = Linear(parts, hidden, mlp, bias=encoder.mlp_bias)
        self._down = Linear({"down": hidden}, inter, mlp, bias=encoder.mlp_bias)
        self._norms = {
            name: LayerNorm(hidden, build, bias=encoder.norm_bias)
            for name in ("attn_norm", "mlp_norm")
            if name == "mlp_norm" or layer.has_attn_norm
        }
        self._spec, self._layer = encoder, layer
        self._attention, self._activate, self._gated = (
            build.of(encoder_attention),
            build.of(activate),
            build.of(gated),
        )

    def weight_loaders(self) -> dict[str, WeightLoader]:
        loaders = prefixed("attn.", {**self._qkv.weight_loaders(), **self._o.weight_loaders()})
        loaders |= prefixed("mlp.", {**self._up.weight_loaders(), **self._down.weight_loaders()})
        for name, norm in self._norms.items():
            loaders |= prefixed(f"{name}.", norm.weight_loaders())
        return loaders

    def __call__(self, x: Tensor, sequences: WholeSequences, relative: Tensor | None) -> Tensor:
        """``[num_rows, hidden_size]`` → the same shape, of a layer whose norms come after its blocks."""
        x = self._norms["attn_norm"].add(self._attend(x, sequences, relative), x)[0]
        return self._norms["mlp_norm"].add(self._mlp(x), x)[0]

    def _attend(self, x: Tensor, sequences: WholeSequences, relative: Tensor | None) -> Tensor:
        spec = self._spec
        mixed = self._attention(
            self._qkv(x), sequences, spec.num_heads, spec.head_dim**-0.5, self._layer.window, relative
        )
        return self._o(mixed)

    def _mlp(self, x: Tensor) -> Tensor:
        up, kind = self._up(x), self._spec.activation
        if self._spec.gated:
            assert kind != "relu"
            return self._down(self._gated(up, kind))
        return self._down(self._activate(up, kind))


class Encoder:
    """The whole model; `load` gives it its weights."""

    def __init__(self, spec: ModelSpec, build: Build) -> None:
        assert spec.encoder is not None
        self.spec, self.encoder = spec, spec.encoder
        self._dtype = build.dtype
        shapes = weight_shapes(spec)
        tables = ("embed.weight", "positions.table", "types.table", "relative.table")
        self._tables = {
            name: torch.zeros(shapes[name], dtype=build.dtype) for name in tables if name in shapes
        }
        bias = self.encoder.norm_bias
        self._head: tuple[Linear, Linear] | None = None
        if labels := len(self.encoder.labels):
            hidden, of_head = spec.hidden_size, build.under("head.")
            dense = Linear({"dense": hidden}, hidden, of_head, bias=True)
            self._head = dense, Linear({"out": labels}, hidden, of_head, bias=True)
        self._embed_norm = LayerNorm(spec.hidden_size, build, bias=bias)
        self._blocks = [
            EncoderBlock(layer, self.encoder, spec.hidden_size, build.under(f"layers.{index}."))
            for index, layer in enumerate(self.encoder.layers)
        ]

    @cached_property
    def _loaders(self) -> dict[str, WeightLoader]:
        loaders = {name: copy_into(table) for name, table in self._tables.items()}
        loaders |= prefixed("embed_norm.", self._embed_norm.weight_loaders())
        for linear in self._head or ():
            loaders |= prefixed("head.", linear.weight_loaders())
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
        if "positions.table" in self._tables:
            x += (
                self._tables["positions.table"]
                .index_select(0, positions + self.encoder.first_position)
                .float()
            )
        if "types.table" in self._tables:
            types = types if self.encoder.pair_types else torch.zeros_like(types)
            x += self._tables["types.table"].index_select(0, types).float()
        rows = self._embed_norm(x).to(self._dtype)
        for block in self._blocks:
            rows = block(rows, sequences, self._relative)
        return rows

    def scores(self, rows: Tensor) -> Tensor:
        """``rows [num_texts, hidden_size]``, the first of each text → fp32 ``[num_texts, num_labels]``.

        They are logits, or their sigmoids, as the files say.
        """
        assert self._head is not None, "this model is no classifier"
        dense, out = self._head
        logits = out(torch.tanh(dense(rows).float()).to(rows.dtype), out_dtype=torch.float32)
        return torch.sigmoid(logits) if self.encoder.score == "sigmoid" else logits

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
