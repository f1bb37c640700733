"""What reads an encoder's last rows of a text: `ClassifierHead` gives scores, `SparseHead` a weight per token."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.encoder_spec import EncoderSpec, HeadSpec
from quire.kernels.attention import TILE
from quire.kernels.encoder import activate
from quire.layers.encoder_norm import norm_of
from quire.layers.linear import Linear
from quire.layers.pooled_rows import pooled
from quire.layers.weights import Build, WeightLoader, prefixed


class ClassifierHead:
    """Scores of a text from its rows, as a `HeadSpec` says."""

    def __init__(self, spec: HeadSpec, encoder: EncoderSpec, hidden: int, build: Build) -> None:
        self._spec = spec
        self._dense = Linear({"dense": hidden}, hidden, build, bias=spec.dense_bias)
        self._norm = norm_of(encoder, hidden, build) if spec.norm else None
        self._out = Linear({"out": len(spec.labels)}, hidden, build, bias=True)
        self._activate = build.of(activate)

    def weight_loaders(self) -> dict[str, WeightLoader]:
        loaders = {**self._dense.weight_loaders(), **self._out.weight_loaders()}
        return (
            loaders if self._norm is None else {**loaders, **prefixed("norm.", self._norm.weight_loaders())}
        )

    def __call__(self, rows: Tensor, *, raw: bool) -> Tensor:
        """``rows [num_tokens, hidden_size]`` of one text → fp32 ``[num_labels]``: scores, if ``raw`` their logits."""
        row = rows[:1] if self._spec.rows == "cls" else pooled(rows, "mean")[None].to(rows.dtype)
        row, kind = self._dense(row), self._spec.activation
        row = torch.tanh(row.float()).to(row.dtype) if kind == "tanh" else self._activate(row, kind)
        logits = self._out(row if self._norm is None else self._norm(row), out_dtype=torch.float32)[0]
        if raw or self._spec.score == "identity":
            return logits
        return torch.sigmoid(logits) if self._spec.score == "sigmoid" else torch.softmax(logits, -1)


class SparseHead:
    """A weight per token of the vocabulary, most of them zero, as a `VocabularyHead` says."""

    def __init__(self, encoder: EncoderSpec, hidden: int, vocab_size: int, build: Build) -> None:
        assert encoder.vocabulary is not None
        self._spec = encoder.vocabulary
        self._dense = Linear({"dense": hidden}, hidden, build, bias=self._spec.dense_bias)
        self._norm = norm_of(encoder, hidden, build)
        self._out = Linear({"out": vocab_size}, hidden, build, bias=True)
        self._activate = build.of(activate)

    def weight_loaders(self) -> dict[str, WeightLoader]:
        linears = {**self._dense.weight_loaders(), **self._out.weight_loaders()}
        return {**linears, **prefixed("norm.", self._norm.weight_loaders())}

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """``rows [num_tokens, hidden_size]`` of one text → ids of tokens, rising, and fp32 weights above 0."""
        # The logits of a tile of rows are held at a time.
        found: Tensor | None = None
        for start in range(0, len(rows), TILE):
            tile = self._norm(self._activate(self._dense(rows[start : start + TILE]), self._spec.activation))
            logits = self._out(tile, out_dtype=torch.float32)
            if self._spec.over_rows == "max":
                # The largest logit has the largest weight.
                largest = logits.amax(0)
                found = largest if found is None else torch.maximum(found, largest)
                continue
            for row in self._weights(logits):
                found = row if found is None else found + row
        assert found is not None, "a text has a row"
        weights = self._weights(found) if self._spec.over_rows == "max" else found
        ids = torch.nonzero(weights)[:, 0]
        return ids, weights[ids]

    def _weights(self, logits: Tensor) -> Tensor:
        weights = torch.log1p(torch.relu(logits))
        return torch.log1p(weights) if self._spec.log_twice else weights
