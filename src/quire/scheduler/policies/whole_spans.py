"""Spans whose tokens see each other both ways are computed in one step: a chunk ends with such a span, or before it.

    prompt      a b c ▒ ▒ ▒ ▒ d e          ▒: a span
    chunks      a b│c│▒ ▒ ▒ ▒ d│e          never a b c ▒│▒ ▒ ▒ d
    a hit       a b c ▒ ▒│▒ ▒ d e          may end in one: K and V of all of it were computed together

A span that is next may have more of a step than its share, and what a smaller budget that came later took away, so
that it is computed once the prompts before it in rank are. The settings leave room for the longest one beside a decode
of each seat (`quire.cost.vision`).
"""

from __future__ import annotations

from quire.scheduler.policy import Policy
from quire.scheduler.sequence import Sequence
from quire.scheduler.state import SchedulerState
from quire.spans import Span


class Rule(Policy):
    """Where chunks of sequences with such spans end."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def tokens(self, seq: Sequence, num_tokens: int, num_left: int) -> int:
        """Return how many tokens of ``seq`` a chunk has, in place of ``num_tokens``. ``num_left``: of the step."""
        start = seq.num_planned
        span = _cut_by(seq, start + num_tokens)
        if span is None or num_tokens <= 0:
            return num_tokens
        state = self._state
        num_left += state.start_config.max_num_batched_tokens - state.config.max_num_batched_tokens
        return span.end - start if span.end - start <= num_left else max(span.start - start, 0)

    def least_end(self, seq: Sequence) -> int:
        """Return where the shortest chunk of ``seq`` ends."""
        end = seq.num_planned + 1
        span = _cut_by(seq, end)
        return end if span is None else span.end

    def end(self, seq: Sequence, end: int) -> int:
        """Return ``end``, or the start of the span that it cuts."""
        span = _cut_by(seq, end)
        return end if span is None else span.start


def _cut_by(seq: Sequence, end: int) -> Span | None:
    """Return the span of ``seq`` that a chunk up to ``end`` would cut."""
    for span in seq.group.request.spans:
        if span.whole and span.start < end < span.end:
            return span
    return None
