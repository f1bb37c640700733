"""Layers to whose output an encoder of images adds rows (DeepStack, arXiv:2406.04334): the first ones of Qwen3-VL."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.config import LoraConfig
from quire.kernels.kv_blocks import KvView
from quire.layers.attention import AdapterBatch, CosSin, GroupBatch
from quire.layers.weights import Build
from quire.models.decoder import DecoderLayer, Ends
from quire.modelspec import LayerSpec, ModelSpec


class SeeingEnds(Ends):
    """Ends that keep what an encoder adds in this step."""

    # Rows of the step, and what is added to them after each of the first layers, side by side; None: nothing.
    _added: tuple[Tensor, Tensor] | None = None

    def add(self, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Add ``parts`` in the next step, each ``[rows]`` and ``[rows, num_layers · hidden_size]``."""
        self._added = None
        if parts:
            self._added = torch.cat([rows for rows, _ in parts]), torch.cat([added for _, added in parts])

    def add_to(self, residual: Tensor, index: int) -> None:
        """Add what layer ``index`` gives ``residual [num_tokens, hidden_size]``, in place."""
        if self._added is not None:
            rows, added = self._added
            width = residual.shape[1]
            residual.index_add_(0, rows, added[:, index * width : (index + 1) * width])


class SeenLayer(DecoderLayer):
    """A layer after which the rows of images get more."""

    def __init__(
        self, spec: LayerSpec, model: ModelSpec, build: Build, lora: LoraConfig | None = None,
        ends: Ends | None = None, index: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(spec, model, build, lora)
        self._ends, self._index = ends, index

    def __call__(
        self, delta: Tensor | None, residual: Tensor, cos_sin: CosSin | None, group: GroupBatch, kv: KvView,
        rows: Tensor | None = None, adapters: AdapterBatch | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """As of `DecoderLayer`."""
        delta, residual = super().__call__(delta, residual, cos_sin, group, kv, rows, adapters)
        assert isinstance(self._ends, SeeingEnds)
        assert rows is None
        self._ends.add_to(residual, self._index)
        return delta, residual


def kinds(num_layers: int) -> tuple[type[Ends], Callable[..., DecoderLayer]]:
    """Return what a decoder is built of whose first ``num_layers`` layers get rows of an encoder."""

    def stacked_layer(
        spec: LayerSpec, model: ModelSpec, build: Build, lora: LoraConfig | None, ends: Ends, index: int
    ) -> DecoderLayer:
        return (SeenLayer if index < num_layers else DecoderLayer)(spec, model, build, lora, ends, index)

    return SeeingEnds, stacked_layer
