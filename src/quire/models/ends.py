"""`Ends`: the two ends of a model, token ids → rows and rows → logits. Heads that draft share them with the model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from quire.kernels.lora import AdapterRows
from quire.kernels.pointwise import cap_logits
from quire.layers.linear import Embedding
from quire.layers.weights import Build, Stage, WeightLoader
from quire.modelspec import ModelSpec
from quire.quant.stored import Weight


class Ends:
    """The embedding and the output matrix, or what a rank has of them."""

    def __init__(self, spec: ModelSpec, build: Build, stage: Stage, *, adapted: bool = False) -> None:
        """``stage``: which of the two are here. ``adapted``: adapters may change them."""
        self.dtype = build.dtype
        self._scale, self._cap = spec.logits_scale, spec.logits_soft_cap
        tied, scale = spec.tie_word_embeddings, spec.embedding_scale
        self.embedding = Embedding(
            spec.vocab_size, spec.hidden_size, build, tied=tied, scale=scale, stage=stage, adapted=adapted
        )
        self._cap_logits = build.of(cap_logits)

    def weight_loaders(self) -> dict[str, WeightLoader]:
        return self.embedding.weight_loaders()

    def load(self, weights: Iterable[tuple[str, Weight]]) -> None:
        """Take the weights from a stream of (canonical name, tensor)."""
        loaders = self.weight_loaders()
        with torch.inference_mode():
            for name, weight in weights:
                loaders[name](weight)

    def embed(self, input_ids: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """``input_ids [num_tokens]`` → ``[num_tokens, hidden_size]``, as the first layer reads them."""
        return self.embedding(input_ids, adapters)

    def logits(self, hidden: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """``[num_logits, hidden_size]`` → fp32 ``[num_logits, vocab_size]``, scaled and capped as the model defines."""
        logits = self.embedding.logits(hidden, adapters)
        if self._scale == 1.0 and self._cap is None:
            return logits
        return self._cap_logits(logits, self._scale, self._cap)
