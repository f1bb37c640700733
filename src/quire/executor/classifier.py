"""`ClassifyingExecutor`: around the executor of a decoder with a classifier (`Qwen3ForSequenceClassification`).

The decoder gives the row of a text's last token; its scores are made of that row here, in float64: a logit is the sum
of the products of the row and the weights of its label.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from quire.config import ModelConfig
from quire.errors import ModelLoadError
from quire.executor.base import Executor
from quire.models.safetensors_file import read_checkpoint
from quire.models.stored_weights import view
from quire.pooling import Pooling
from quire.step import NewSeq, StepPlan, StepResult

_NAME = "score.weight"
Array = NDArray[np.float64]


class ClassifyingExecutor:
    """Passes plans on to ``inner``, which knows of no classifier."""

    def __init__(self, inner: Executor, model: ModelConfig) -> None:
        """Read the weights.

        Raises:
            ModelLoadError: there are none, or of another shape.
        """
        assert model.spec.sentence is not None
        self.inner = inner
        self.max_in_flight, self.chains_steps = inner.max_in_flight, inner.chains_steps
        self._kind = model.spec.sentence.score
        self._weights = _read(model)
        self._raw: dict[int, bool] = {}  # sequences that want scores, or logits

    def submit(self, plan: StepPlan) -> None:
        """Queue a plan, in which a text that is to be classified gives its last row."""
        for seq_id in plan.gone:
            self._raw.pop(seq_id, None)
        self.inner.submit(replace(plan, new_seqs=tuple(map(self._of_row, plan.new_seqs))))

    def _of_row(self, new: NewSeq) -> NewSeq:
        if new.pooling is None or new.pooling.kind not in ("classify", "logits"):
            return new
        self._raw[new.seq_id] = new.pooling.kind == "logits"
        return replace(new, pooling=Pooling("last"))

    def collect(self) -> StepResult:
        """Return the oldest result, with scores for rows."""
        result = self.inner.collect()
        seqs = tuple(
            seq
            if seq.pooled is None or seq.seq_id not in self._raw
            else seq._replace(pooled=self._scores(seq.pooled, raw=self._raw[seq.seq_id]))
            for seq in result.seqs
        )
        return replace(result, seqs=seqs)

    def _scores(self, row: tuple[float, ...], *, raw: bool) -> tuple[float, ...]:
        logits = np.multiply(self._weights, np.array(row)).sum(1)
        return tuple((logits if raw else scores_of(logits, self._kind)).tolist())

    def close(self) -> None:
        """Free what ``inner`` holds."""
        self.inner.close()


def scores_of(logits: Array, kind: Literal["sigmoid", "identity", "softmax"]) -> Array:
    """``[num_labels]`` → the same: logits to scores."""
    if kind == "identity":
        return logits
    if kind == "sigmoid":
        return np.asarray(1.0 / (1.0 + np.exp(-np.clip(logits, -700.0, 700.0))))
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def _read(model: ModelConfig) -> Array:
    """Return ``[num_labels, hidden_size]``."""
    assert model.spec.sentence is not None
    shape = len(model.spec.sentence.labels), model.spec.hidden_size
    if model.load_format == "random":
        return np.random.default_rng(model.seed).normal(0.0, 0.02, shape)
    stored = read_checkpoint(Path(model.path)).get(_NAME)
    if stored is None or tuple(stored.shape) != shape:
        found = "missing" if stored is None else f"{list(stored.shape)}"
        raise ModelLoadError(
            f"{model.path}: {_NAME} is {found}, and config.json asks for {list(shape)}; download the model again."
        )
    return np.asarray(view(stored).double().numpy())
