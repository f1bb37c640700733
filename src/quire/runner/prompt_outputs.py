"""What a prompt's own tokens give: log-probabilities, or a vector of hidden states.

    prompt     t0   t1   t2   t3          the row of token p predicts token p + 1: with rows 0 … num_prompt − 2 every
    row         0    1    2    3          token but the first has its log-probability
    scores     t1   t2   t3    ·          "last" and "logprobs" take the last row, "mean" all of them

Each value depends on its own row alone, and a mean is added up in the order of positions, in float64: so a prompt in
chunks gives the bits of a whole one. Logits exist for a slice of the rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.sampling import SCRATCH_ELEMENTS
from quire.request import Pooling, TokenLogprobs
from quire.sampling.seq_state import Means, SeqState
from quire.step import NewSeq, SeqPlan

PROMPT_NOT_FINITE = (
    "the model's hidden states are not finite (NaN or infinity): the checkpoint or its dtype is at fault."
)

Score = Callable[[Tensor, Sequence[int], Sequence[int]], list[TokenLogprobs]]


@dataclass(eq=False)
class PromptState(SeqState):
    """A prompt of which something is wanted."""

    token_ids: Sequence[int]
    num_logprobs: int | None
    pooling: Pooling | None
    adapter_slot: int = 0  # 0: the base model
    total: NDArray[np.float64] | None = None  # sum of the rows so far, for a mean

    def positions(self) -> range:
        """Return the positions whose rows are wanted."""
        if self.pooling is None:
            return range(len(self.token_ids) - 1)
        return range(0 if self.pooling.whole_prompt else len(self.token_ids) - 1, len(self.token_ids))


def begin(new: NewSeq, means: Means) -> PromptState:
    """Return the state of a prompt of which nothing is computed."""
    return PromptState(new.prompt_token_ids, new.prompt_logprobs, new.pooling, new.adapter_slot)


class Span(NamedTuple):
    """Tokens of a step that are wanted of one prompt: ``num_tokens`` of them, the first is ``start`` of the step's."""

    seq_id: int
    prompt: PromptState
    start: int
    position: int
    num_tokens: int

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Their places in the step."""
        return np.arange(self.start, self.start + self.num_tokens)


class PromptOutput(NamedTuple):
    """What the tokens of one step gave a prompt; one of the three."""

    logprobs: tuple[TokenLogprobs, ...] | None = None
    pooled: tuple[float, ...] | None = None
    error: str | None = None


def scored_spans(plans: Sequence[SeqPlan], prompts: Sequence[PromptState | None]) -> list[Span]:
    """Return the wanted tokens of a step over ``plans``, whose sequences have ``prompts``, in their order."""
    spans: list[Span] = []
    before = 0  # tokens of the step
    for plan, prompt in zip(plans, prompts, strict=True):
        if prompt is not None:
            begin, wanted = plan.num_computed_tokens, prompt.positions()
            first = max(begin, wanted.start)
            count = min(begin + plan.num_scheduled_tokens, wanted.stop) - first
            if count > 0:
                spans.append(Span(plan.seq_id, prompt, before + first - begin, first, count))
        before += plan.num_scheduled_tokens
    return spans


class PromptScorer:
    """Hidden states of prompts → what was asked of them.

    ``logits_of(hidden [rows, hidden_size], adapter slot)`` gives raw logits, ``score(logits, token_ids, num_top)`` a
    `TokenLogprobs` for each row of them.
    """

    def __init__(self, logits_of: Callable[[Tensor, int], Tensor], score: Score, vocab_size: int) -> None:
        self.logits_of = logits_of
        self._score = score
        self._rows_at_once = max(1, SCRATCH_ELEMENTS // vocab_size)

    @torch.inference_mode()
    def outputs(self, spans: Sequence[Span], hidden: Tensor) -> dict[int, PromptOutput]:
        """Return what ``spans`` gave by sequence. ``hidden: [tokens of all spans, hidden_size]``."""
        outputs: dict[int, PromptOutput] = {}
        start = 0
        for span in spans:
            rows = hidden[start : start + span.num_tokens]
            start += span.num_tokens
            pooling = span.prompt.pooling
            if pooling is None:
                outputs[span.seq_id] = self._logprobs(span, rows)
            elif pooling.kind == "logprobs":
                outputs[span.seq_id] = self._logprobs_of(pooling, rows, span.prompt.adapter_slot)
            else:
                outputs[span.seq_id] = _vector(span, pooling, rows)
        return outputs

    def _logprobs(self, span: Span, rows: Tensor) -> PromptOutput:
        num_top = span.prompt.num_logprobs
        assert num_top is not None
        entries: list[TokenLogprobs] = []
        for first in range(0, span.num_tokens, self._rows_at_once):
            part = rows[first : first + self._rows_at_once]
            target = span.position + 1 + first
            ids = span.prompt.token_ids[target : target + part.shape[0]]
            entries += self._score(self.logits_of(part, span.prompt.adapter_slot), ids, [num_top] * len(ids))
        if any(math.isnan(entry.logprob) for entry in entries):
            return PromptOutput(error=PROMPT_NOT_FINITE)
        return PromptOutput(logprobs=tuple(entries))

    def _logprobs_of(self, pooling: Pooling, rows: Tensor, adapter_slot: int) -> PromptOutput:
        logits = self.logits_of(rows, adapter_slot).expand(len(pooling.token_ids), -1)
        entries = self._score(logits, pooling.token_ids, [0] * len(pooling.token_ids))
        return _finite([entry.logprob for entry in entries])


def _vector(span: Span, pooling: Pooling, rows: Tensor) -> PromptOutput:
    """Return the vector, once the last token of the prompt is there."""
    prompt = span.prompt
    values = rows.to(torch.float64).cpu().numpy()  # [num_tokens, hidden_size]
    if pooling.kind == "last":
        return _finite(values[0].tolist())
    if prompt.total is not None:
        values = np.concatenate((prompt.total[None], values))
    prompt.total = np.add.accumulate(values)[-1].copy()  # one row after the other
    if span.position + span.num_tokens < len(prompt.token_ids):
        return PromptOutput()
    return _finite((prompt.total / len(prompt.token_ids)).tolist())


def _finite(values: list[float]) -> PromptOutput:
    if all(map(math.isfinite, values)):
        return PromptOutput(pooled=tuple(values))
    return PromptOutput(error=PROMPT_NOT_FINITE)
