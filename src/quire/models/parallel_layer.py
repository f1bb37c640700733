"""A layer whose attention and MLP read the same normed rows; the residual stream gets the sum of both (Command R)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quire.config import LoraConfig
from quire.layers import context_rows as cp_rows
from quire.layers.attention import AdapterBatch, CosSin
from quire.layers.centered_norm import CenteredNorm
from quire.layers.weights import Build, WeightLoader, prefixed
from quire.models.decoder import DecoderLayer, Ends
from quire.modelspec import LayerSpec, ModelSpec


class ParallelLayer(DecoderLayer):
    """Called as `DecoderLayer`."""

    def __init__(
        self, spec: LayerSpec, model: ModelSpec, build: Build, lora: LoraConfig | None = None,
        ends: Ends | None = None, index: int = 0,
    ) -> None:  # fmt: skip
        assert spec.norms == "parallel"
        assert model.residual_scale == 1.0
        assert model.norm_centered
        super().__init__(spec, model, build, lora)
        self._norms.clear()
        self._norm = CenteredNorm(model.hidden_size, build)

    def weight_loaders(self) -> dict[str, WeightLoader]:
        return {**super().weight_loaders(), **prefixed("attn_norm.", self._norm.weight_loaders())}

    def __call__(
        self, delta: Tensor | None, residual: Tensor, cos_sin: CosSin | None, group: Any, kv: Any,
        rows: Tensor | None = None, adapters: AdapterBatch | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """As of `DecoderLayer`."""
        of_rows = None if adapters is None else adapters.tokens
        x, residual = self._norm.enter(delta, residual)
        delta = self.mixer(x, cos_sin, group, kv, of_rows)
        if rows is not None and group.divided:
            assert self._cp is not None
            delta, residual = cp_rows.all_rows(self._cp, len(group.slot_blocks), delta, residual)
            x = self._cp.gather(x, len(group.slot_blocks))
        if rows is not None:
            delta, residual, x = (self._take_rows(each, rows) for each in (delta, residual, x))
            of_rows = None if adapters is None else adapters.logits
        return self._add_rows(delta, self.mlp(x, of_rows)), residual
