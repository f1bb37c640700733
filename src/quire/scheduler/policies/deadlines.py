"""Limits of requests in time: a sequence that missed one is ended, by `FinishReason.DEADLINE`.

    plan     `expire`, first of all: a limit has passed → the sequence ends
    apply    a first token that comes too late ends its sequence likewise (`Sequence.misses_first_token`)

On from the first request with a deadline on. `overload` rejects requests that cannot meet theirs any more. A function
of ``now``, so a simulated run decides as the real one.
"""

from __future__ import annotations

import heapq

from quire.request import Request, TokenEvent
from quire.scheduler.policy import Policy
from quire.scheduler.sequence import RequestState, Sequence
from quire.scheduler.state import SchedulerState


class Rule(Policy):
    """The limits of the requests at work, the next one first. Those of requests that ended stay until they are due."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._heap: list[tuple[float, str]] = []

    def on_add(self, group: RequestState) -> None:
        request = group.request
        if request.terms.deadline is not None:
            for limit_s in (request.terms.deadline.first_token_s, request.terms.deadline.total_s):
                if limit_s is not None:
                    heapq.heappush(self._heap, (request.arrival_s + limit_s, request.request_id))

    def expire(self, now: float) -> list[TokenEvent]:
        state, events = self._state, []
        requests: dict[str, Request] = {}
        while self._heap and self._heap[0][0] <= now:
            group = state.requests.get(heapq.heappop(self._heap)[1])
            if group is None:
                continue
            requests[group.request.request_id] = group.request
            # Last first, so that siblings go before the leader that they are attached to.
            for seq in reversed(tuple(group.sequences)):
                missed = _missed(seq, now)
                if missed is not None:
                    events.append(state.end_late(seq, missed))
        # Beams are more than their request has answers.
        return [e for e in events if e.sample_index < requests[e.request_id].sampling.num_samples]

    def wakes_at(self) -> float | None:
        return self._heap[0][0] if self._heap and self._state.sequences else None


def _missed(seq: Sequence, now: float) -> str | None:
    request = seq.group.request
    deadline = request.terms.deadline
    assert deadline is not None
    total_s, first_s = deadline.total_s, deadline.first_token_s
    if total_s is not None and now >= request.arrival_s + total_s:  # the same sum as in `Rule`
        return "total"
    has_token = len(seq.token_ids) > seq.num_prompt and not seq.is_beam  # beams give all at their end
    if first_s is not None and now >= request.arrival_s + first_s and not has_token:
        return "first_token"
    return None
