"""What a prompt's own rows give: log-probabilities of its tokens, or a vector of its hidden states.

    prompt      t0   t1   t2   t3          row p predicts token p + 1: with rows 0 … num_prompt − 2 every token but the
    rows         0    1    2    3          first has its log-probability
    scored     t1   t2   t3    ·           "last" and "logprobs" take the last row, "mean" all of them

Each value depends on its own row alone, and a mean is added up in the order of positions, in float64: so a prompt in
chunks gives the bits of a whole one. Logits exist for a slice of the rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.request import Pooling, TokenLogprobs
from quire.step import NewSeq, SeqPlan

_LOGITS_AT_ONCE = 1 << 22  # numbers

Score = Callable[[Tensor, Sequence[int], Sequence[int]], list[TokenLogprobs]]


class Span(NamedTuple):
    """Rows of a step that belong to one prompt: ``num_rows`` of them from row ``row``, at ``position`` …"""

    seq_id: int
    row: int
    position: int
    num_rows: int


class PromptOutput(NamedTuple):
    """What the rows of one step gave a prompt; one of the three."""

    logprobs: tuple[TokenLogprobs, ...] | None = None
    pooled: tuple[float, ...] | None = None
    error: str | None = None


class _Prompt:
    """A prompt some of whose rows are wanted."""

    __slots__ = ("num_logprobs", "pooling", "token_ids", "total")

    def __init__(self, new: NewSeq) -> None:
        self.token_ids = new.prompt_token_ids
        self.num_logprobs = new.prompt_logprobs
        self.pooling = new.pooling
        self.total: NDArray[np.float64] | None = None  # of the rows so far, for a mean

    def positions(self) -> range:
        """Return the positions whose rows are wanted."""
        if self.pooling is None:
            return range(len(self.token_ids) - 1)
        return range(0 if self.pooling.whole_prompt else len(self.token_ids) - 1, len(self.token_ids))


class PromptRows:
    """The prompts of a worker's sequences that want something of their rows.

    ``logits_of(hidden [rows, hidden_size])`` gives raw logits, ``score(logits, token_ids, num_top)`` a `TokenLogprobs`
    for each row of them.
    """

    def __init__(self, logits_of: Callable[[Tensor], Tensor], score: Score, vocab_size: int) -> None:
        self._logits_of = logits_of
        self._score = score
        self._rows_at_once = max(1, _LOGITS_AT_ONCE // vocab_size)
        self._prompts: dict[int, _Prompt] = {}

    def __bool__(self) -> bool:
        return bool(self._prompts)

    def add(self, new: NewSeq) -> None:
        """Take a sequence, or take it anew; one that wants nothing is not kept."""
        self.remove(new.seq_id)
        if new.pooling is not None or new.prompt_logprobs is not None:
            self._prompts[new.seq_id] = _Prompt(new)

    def remove(self, seq_id: int) -> None:
        self._prompts.pop(seq_id, None)

    def spans(self, plans: Sequence[SeqPlan]) -> list[Span]:
        """Return the wanted rows of a step whose sequences are ``plans``, in their order."""
        found: list[Span] = []
        row = 0
        for plan in plans:
            prompt = self._prompts.get(plan.seq_id)
            if prompt is not None:
                start, wanted = plan.num_computed_tokens, prompt.positions()
                first = max(start, wanted.start)
                count = min(start + plan.num_scheduled_tokens, wanted.stop) - first
                if count > 0:
                    found.append(Span(plan.seq_id, row + first - start, first, count))
            row += plan.num_scheduled_tokens
        return found

    @torch.inference_mode()
    def outputs(self, spans: Sequence[Span], hidden: Tensor) -> dict[int, PromptOutput]:
        """Return what ``spans`` gave by sequence. ``hidden: [rows of all spans, hidden_size]``."""
        found: dict[int, PromptOutput] = {}
        start = 0
        for span in spans:
            rows = hidden[start : start + span.num_rows]
            start += span.num_rows
            prompt = self._prompts[span.seq_id]
            if prompt.pooling is None:
                output = self._logprobs(prompt, span, rows)
            elif prompt.pooling.kind == "logprobs":
                output = self._logprobs_of(prompt.pooling, rows)
            else:
                output = _vector(prompt, prompt.pooling, span, rows)
            found[span.seq_id] = output
        return found

    def _logprobs(self, prompt: _Prompt, span: Span, rows: Tensor) -> PromptOutput:
        assert prompt.num_logprobs is not None
        entries: list[TokenLogprobs] = []
        for first in range(0, span.num_rows, self._rows_at_once):
            part = rows[first : first + self._rows_at_once]
            target = span.position + 1 + first
            ids = prompt.token_ids[target : target + part.shape[0]]
            entries += self._score(self._logits_of(part), ids, [prompt.num_logprobs] * len(ids))
        if any(math.isnan(entry.logprob) for entry in entries):
            return PromptOutput(error=_NOT_FINITE)
        return PromptOutput(logprobs=tuple(entries))

    def _logprobs_of(self, pooling: Pooling, rows: Tensor) -> PromptOutput:
        logits = self._logits_of(rows).expand(len(pooling.token_ids), -1)
        entries = self._score(logits, pooling.token_ids, [0] * len(pooling.token_ids))
        return _finite([entry.logprob for entry in entries])


def rows_of(spans: Sequence[Span]) -> NDArray[np.int64]:
    """Return the rows of ``spans`` in the step, in order."""
    return np.concatenate([np.arange(span.row, span.row + span.num_rows) for span in spans])


def _vector(prompt: _Prompt, pooling: Pooling, span: Span, rows: Tensor) -> PromptOutput:
    """Return the vector, once the last row of the prompt is there."""
    values = rows.to(torch.float64).cpu().numpy()  # [num_rows, hidden_size]
    if pooling.kind == "last":
        return _finite(values[0].tolist())
    if prompt.total is not None:
        values = np.concatenate((prompt.total[None], values))
    prompt.total = np.add.accumulate(values)[-1].copy()  # one row after the other
    if span.position + span.num_rows < len(prompt.token_ids):
        return PromptOutput()
    return _finite((prompt.total / len(prompt.token_ids)).tolist())


def _finite(values: list[float]) -> PromptOutput:
    if all(map(math.isfinite, values)):
        return PromptOutput(pooled=tuple(values))
    return PromptOutput(error=_NOT_FINITE)


_NOT_FINITE = (
    "the model's hidden states are not finite (NaN or infinity): the checkpoint or its dtype is at fault."
)
