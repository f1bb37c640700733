"""The orders other than by arrival, as sort keys; equal ranks fall back to arrival, then to the sequence id.

    priority         Request.priority (smaller first), aged: each `AGING_S` of waiting count as one step of priority
    shortest-first   number of prompt tokens, then arrival; the output's length is not known
    longest-prefix   most tokens in the prefix tree at this moment, then arrival; among the first 128 that wait

The same key ranks running sequences when blocks run out: the last one is preempted first. Running sequences have
their prefix already, so under longest-prefix they rank by arrival. "fair" and "deadline" have modules of their own.
"""

from __future__ import annotations

from quire.request import Request
from quire.scheduler.policy import LOOKAHEAD, Policy
from quire.scheduler.sequence import Sequence, SortKey
from quire.scheduler.state import SchedulerState
from quire.scheduler.waiting import StepRoom

AGING_S = 30.0  # waiting that makes up for one step of priority
MAX_STEPS = 1000  # priority that counts; further steps only break ties


class Rule(Policy):
    """The order that the settings name."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def rank(self, seq: Sequence) -> SortKey:
        request, order = seq.group.request, self._state.config.order
        if order == "priority":
            return (aged_s(request), request.terms.priority, request.arrival_s, seq.seq_id)
        if order == "shortest-first":
            return (seq.num_prompt, request.arrival_s, seq.seq_id)
        return (request.arrival_s, seq.seq_id)

    def budget(self, room: StepRoom) -> None:
        if self._state.config.order == "longest-prefix":
            room.order = self._by_prefix

    def _by_prefix(self, count: int) -> list[Sequence]:
        nearest = self._state.waiting.first(max(count, LOOKAHEAD))
        match = self._state.cache.match
        nearest.sort(key=lambda seq: -match(seq.table, seq.token_ids).num_tokens)  # stable: ties by arrival
        return nearest[:count]


def aged_s(request: Request) -> float:
    """Return the rank of a request under the order priority, in seconds.

    The rank does not depend on the time: of two requests that wait, the difference of their ages stays. A request is
    overtaken only by those that arrive less than `AGING_S` after it per step of priority, so that none starves.
    """
    return request.arrival_s + AGING_S * min(max(request.terms.priority, -MAX_STEPS), MAX_STEPS)
