"""Spans whose tokens see each other both ways are computed in one step: a chunk ends with such a span, or before it.

    prompt      a b c ▒ ▒ ▒ ▒ d e          ▒: a span
    chunks      a b│c│▒ ▒ ▒ ▒ d│e          never a b c ▒│▒ ▒ ▒ d
    a hit       a b c ▒ ▒│▒ ▒ d e          may end in one: K and V of all of it were computed together

A span may have more of a step than its share. Where a chunk begins with it, it also may have what a smaller budget that
came later took away. So it is computed once the prompts before it in rank are. The settings leave room for the longest
one next to a decode of each seat (`quire.cost.vision`), and drafts leave that room as well.
"""

from __future__ import annotations

from quire.scheduler.policy import Policy
from quire.scheduler.sequence import RequestState, Sequence
from quire.scheduler.state import SchedulerState
from quire.scheduler.waiting import StepRoom
from quire.spans import Span
from quire.step import SeqPlan


class Rule(Policy):
    """Where chunks of sequences with such spans end."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._longest = 0  # tokens

    def on_add(self, group: RequestState) -> None:
        """Note the longest span so far."""
        spans = group.request.spans
        self._longest = max(self._longest, *[span.length for span in spans if span.whole], 0)

    def left_for_drafts(self, room: StepRoom) -> int:
        """Return how many tokens of a step drafts may have, so that the longest span fits next to them."""
        if not (room.prefills or room.waiting):
            return room.left
        state = self._state
        taken = state.start_config.max_num_batched_tokens - state.config.max_num_batched_tokens
        return min(room.left, room.left + taken - self._longest)

    def tokens(self, seq: Sequence, num_tokens: int, num_left: int) -> int:
        """Return how many tokens of ``seq`` a chunk has, in place of ``num_tokens``. ``num_left``: of the step."""
        start = seq.num_planned
        span = _cut_by(seq, start + num_tokens)
        if span is None or num_tokens <= 0:
            return num_tokens
        before, state = max(span.start - start, 0), self._state
        if not before:
            num_left += state.start_config.max_num_batched_tokens - state.config.max_num_batched_tokens
        return span.end - start if span.end - start <= num_left else before

    def least_end(self, seq: Sequence) -> int:
        """Return where the shortest chunk of ``seq`` ends."""
        end = seq.num_planned + 1
        span = _cut_by(seq, end)
        return end if span is None else span.end

    def is_least(self, seq: Sequence, plan: SeqPlan) -> bool:
        """Tell whether a chunk of ``seq`` is a span or its end, so that no smaller one can take its place."""
        start = plan.num_computed_tokens
        span = _cut_by(seq, start + 1)
        return span is not None and span.end == start + plan.num_scheduled_tokens

    def fits(self, seq: Sequence) -> bool:
        """Tell whether the shortest chunk of ``seq``, which enters, has its blocks without a preemption.

        Sequences that run have their places in the step by then. Where it does not fit, the next step makes room.
        """
        return self._state.cache.reachable_end(seq.table) >= self.least_end(seq)

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
