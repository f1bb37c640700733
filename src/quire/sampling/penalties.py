"""logit_bias and the penalties: presence, frequency (OpenAI) and repetition (Keskar et al. 2019, as in HF and vLLM).

Order: bias, repetition (prompt and output ids: a positive logit is divided by it, a negative one multiplied), then
``frequency * count + presence`` (output ids) is subtracted. Every operation is elementwise on a row's own ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.request import Sampling


class Penalties:
    """Bias and penalties of one sequence; grows with its output, where a device does not count that itself."""

    def __init__(self, params: Sampling) -> None:
        self.frequency = np.float32(params.frequency_penalty)
        self.presence = np.float32(params.presence_penalty)
        self.repetition = params.repetition_penalty
        self._subtracts = params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        self.output = TokenCounts()
        self.seen = TokenCounts()  # prompt and output
        self.bias_ids = np.fromiter(params.logit_bias.keys(), np.int64)
        self.biases = np.fromiter(params.logit_bias.values(), np.float32)

    @staticmethod
    def needed(params: Sampling) -> bool:
        penalised = params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        return penalised or params.repetition_penalty != 1.0 or bool(params.logit_bias)

    @property
    def counts(self) -> bool:
        """Whether it matters which ids the sequence has, and how often."""
        return self._subtracts or self.repetition != 1.0

    def add_prompt(self, token_ids: Iterable[int]) -> None:
        if self.repetition != 1.0:
            self.seen.add_all(token_ids)

    def advance(self, token_id: int) -> None:
        if self.repetition != 1.0:
            self.seen.add(token_id)
        if self._subtracts:
            self.output.add(token_id)

    def apply(self, row: Tensor) -> None:
        """Change the logits ``row: [vocab_size] float32`` in place."""
        if self.bias_ids.size:
            row[_tensor(self.bias_ids, row)] += _tensor(self.biases, row)
        if self.repetition != 1.0:
            ids = _tensor(self.seen.ids, row)
            logits = row[ids]
            row[ids] = torch.where(logits > 0, logits / self.repetition, logits * self.repetition)
        if self._subtracts:
            ids = _tensor(self.output.ids, row)
            row[ids] -= _tensor(self.frequency * self.output.counts + self.presence, row)


def _tensor(values: NDArray[np.int64] | NDArray[np.float32], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)


class TokenCounts:
    """Distinct ids in order of first appearance with how often each came; one more id is O(1)."""

    def __init__(self) -> None:
        self._slot_of: dict[int, int] = {}
        self._ids = np.zeros(64, np.int64)
        self._counts = np.zeros(64, np.float32)

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: len(self._slot_of)]

    @property
    def counts(self) -> NDArray[np.float32]:
        return self._counts[: len(self._slot_of)]

    def add(self, token_id: int) -> None:
        slot = self._slot_of.setdefault(token_id, len(self._slot_of))
        if slot == self._ids.size:
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[slot] = token_id
        self._counts[slot] += 1.0

    def add_all(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            self.add(token_id)


def penalties_of(params: Sampling, prompt: Sequence[int], output: Sequence[int]) -> Penalties | None:
    """The state after ``output``, or None where ``params`` asks for no bias and no penalty."""
    if not Penalties.needed(params):
        return None
    penalties = Penalties(params)
    penalties.add_prompt(prompt)
    for token_id in output:
        penalties.advance(token_id)
    return penalties
