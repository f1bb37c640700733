"""What Gemma 4 adds to each layer (`PerLayerSpec`): an embedding of the token for this layer, and a factor.

    embeddings[i] = (norm(rows · projectionᵀ / √hidden)[i] + √size · table[id][i]) / √2        rows: of the embedding
    h = residual + delta of the layer
    h = factor · (h + norm(out(gelu(gate(h)) · embeddings[i])))

The table is looked up where it lies: a view of the checkpoint's mapping is kept, and its rows are read from there. A
quantized table is packed, and its rows are expanded.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
from torch import Tensor

from quire.config import LoraConfig
from quire.kernels.kv_blocks import KvView
from quire.kernels.linear import PackedLinear, pack_empty, read_rows
from quire.kernels.lora import AdapterRows
from quire.kernels.pointwise import add_rows, gated, scale_rows, take_rows
from quire.kernels.quantized_rows import QuantizedRows
from quire.layers.attention import AdapterBatch, CosSin, GroupBatch
from quire.layers.linear import Linear
from quire.layers.norm import RmsNorm
from quire.layers.weights import Build, MatrixLoader, Stage, WeightLoader, prefixed
from quire.models.decoder import DecoderLayer, Ends
from quire.modelspec import LayerSpec, ModelSpec, PerLayerSpec
from quire.quant.stored import Weight


class PerLayerEnds(Ends):
    """Ends that compute the embeddings of all layers with those of the first, and keep them for the step."""

    def __init__(self, spec: ModelSpec, build: Build, stage: Stage, *, adapted: bool = False) -> None:
        super().__init__(spec, build, stage, adapted=adapted)
        assert spec.per_layer is not None
        self._size, self._count = spec.per_layer.embedding_size, spec.num_layers
        of_layers = build.under("per_layer.")
        self._projection = Linear({"projection": self._size * self._count}, spec.hidden_size, of_layers)
        self._norm = RmsNorm(self._size, of_layers)
        self._table = torch.empty(0)
        self._packed: PackedLinear | None = None
        form = build.held("per_layer.table.weight")
        if form.quantized:
            self._packed = pack_empty(
                spec.per_layer.vocab_size, self._size * self._count, build.dtype,
                bias=False, backend=build.matrix_backend(form), format=form,
            )  # fmt: skip
        self._to_rows = spec.hidden_size**-0.5
        self._add, self._scale_by, self._take = build.of(add_rows), build.of(scale_rows), build.of(take_rows)
        self._embeddings: list[Tensor] = []

    def weight_loaders(self) -> dict[str, WeightLoader]:
        packed = self._packed
        table = self._keep_table if packed is None else MatrixLoader([packed], 0)
        loaders: dict[str, WeightLoader] = {"table.weight": table, **self._projection.weight_loaders()}
        loaders.update(prefixed("norm.", self._norm.weight_loaders()))
        return {**super().weight_loaders(), **prefixed("per_layer.", loaders)}

    def _keep_table(self, weight: Weight) -> None:
        assert isinstance(weight, Tensor)
        self._table = weight.to(self.dtype)  # the same tensor where the type is the same

    def embed(self, input_ids: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """As `Ends.embed`; `of_layer` has the embeddings of this step's tokens from then on."""
        rows = super().embed(input_ids, adapters)
        projected = self._scale_by(self._projection(rows), self._to_rows)
        projected = self._norm(torch.unflatten(projected, -1, (self._count, self._size))).flatten(1)
        # Rounded first, as in training.
        factor = torch.tensor(sqrt(self._size), dtype=self.dtype).item()
        packed = self._packed
        looked_up = self._take(self._table, input_ids) if packed is None else read_rows(packed, input_ids)
        looked_up = self._scale_by(looked_up, factor)
        together = self._scale_by(self._add(projected, looked_up), 2.0**-0.5)
        self._embeddings = [part.contiguous() for part in torch.split(together, self._size, dim=1)]
        return rows

    def of_layer(self, index: int) -> Tensor:
        """Return the embeddings of this step's tokens in layer ``index``: ``[num_tokens, size]``."""
        return self._embeddings[index]


class ScaledLayer(DecoderLayer):
    """A layer whose output has a factor, and an embedding of the token before it."""

    def __init__(
        self, spec: LayerSpec, model: ModelSpec, build: Build, lora: LoraConfig | None = None,
        ends: Ends | None = None, index: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(spec, model, build, lora)
        self._ends, self._index, self._factor = ends, index, 1.0
        moe = spec.mlp.moe
        self._normed: Any = self.mlp if moe is not None and moe.own_norms else None
        self._gate: Linear | None = None
        assert model.per_layer is not None
        if size := model.per_layer.embedding_size:
            own = build.under("per_layer.")
            self._gate = Linear({"gate": size}, model.hidden_size, own)
            self._out = Linear({"out": model.hidden_size}, size, own)
            self._out_norm = RmsNorm(model.hidden_size, build)
        self._gated = build.of(gated)

    def weight_loaders(self) -> dict[str, WeightLoader]:
        loaders: dict[str, WeightLoader] = {"scale": self._load_factor}
        if self._gate is not None:
            loaders |= {**self._gate.weight_loaders(), **self._out.weight_loaders()}
            loaders |= prefixed("norm.", self._out_norm.weight_loaders())
        return {**super().weight_loaders(), **prefixed("per_layer.", loaders)}

    def _enter(
        self, name: str, delta: Tensor | None, residual: Tensor
    ) -> tuple[Tensor | QuantizedRows, Tensor]:
        if name == "mlp_norm" and self._normed is not None:
            self._normed.see(delta, residual)
        return super()._enter(name, delta, residual)

    def _load_factor(self, weight: Weight) -> None:
        assert isinstance(weight, Tensor)
        self._factor = weight.float().item()

    def __call__(
        self, delta: Tensor | None, residual: Tensor, cos_sin: CosSin | None, group: GroupBatch, kv: KvView,
        rows: Tensor | None = None, adapters: AdapterBatch | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """As of `DecoderLayer`."""
        delta, residual = super().__call__(delta, residual, cos_sin, group, kv, rows, adapters)
        if self._gate is not None:
            assert isinstance(self._ends, PerLayerEnds)
            embedding = self._ends.of_layer(self._index)
            if rows is not None:
                embedding = self._take_rows(embedding, rows)
            residual = self._add_rows(residual, delta)
            products = self._gated(
                torch.cat((self._gate(residual), embedding), dim=1), self.spec.mlp.activation
            )
            delta = self._out_norm(self._out(products))
        return self._scale_rows(delta, self._factor), self._scale_rows(residual, self._factor)


def kinds(spec: PerLayerSpec) -> tuple[type[Ends], type[DecoderLayer]]:
    """Return what a decoder is built of."""
    return (PerLayerEnds if spec.embedding_size else Ends), ScaledLayer
