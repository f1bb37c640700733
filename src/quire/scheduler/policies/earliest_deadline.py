"""The order "deadline": earliest limit first (EDF); a request without one ranks as if it had `UNBOUNDED_S`.

Behind all others: those that cannot meet their limit any more. They run where nothing else wants their place, and end
when their limit passes.
"""

from __future__ import annotations

from quire.request import Deadline, Request
from quire.scheduler.policies.seats import least_output
from quire.scheduler.policy import LOOKAHEAD, Policy
from quire.scheduler.sequence import Sequence, SequenceState, SortKey
from quire.scheduler.state import SchedulerState

UNBOUNDED_S = 60.0  # limit that a request without a deadline ranks by


class Rule(Policy):
    """Ranks by the next limit."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def rank(self, seq: Sequence) -> SortKey:
        request = seq.group.request
        return (seq.late, due_s(request, has_token=seq.ttft_s is not None), request.arrival_s, seq.seq_id)

    def before_plan(self, now: float) -> None:
        """Rank the sequences that cannot meet their limits any more behind all others."""
        state = self._state
        for seq in (*state.running, *state.waiting.first(LOOKAHEAD)):
            if seq.late or seq.group.request.terms.deadline is None or not self._misses(seq, now):
                continue
            waits = seq.state is SequenceState.WAITING
            if waits:
                state.waiting.remove(seq)
            seq.late = True
            seq.key = self.rank(seq)
            if waits:
                state.waiting.add(seq)

    def _misses(self, seq: Sequence, now: float) -> bool:
        """Tell whether a sequence would miss a limit if all steps from now on had it."""
        pace, request, deadline = self._state.predictor, seq.group.request, seq.group.request.terms.deadline
        assert deadline is not None
        num_left = max(0, seq.num_prompt - seq.num_planned) * self._state.counters.uncached_share
        first_s = now - request.arrival_s + max(num_left * pace.prompt_token_s, pace.step_s)
        if deadline.first_token_s is not None and seq.ttft_s is None and first_s > deadline.first_token_s:
            return True
        num_outputs = max(0, least_output(request) - (len(seq.token_ids) - seq.num_prompt) - 1)
        return deadline.total_s is not None and first_s + num_outputs * pace.step_s > deadline.total_s


def due_s(request: Request, *, has_token: bool) -> float:
    """Return the time of the next limit of ``request``."""
    deadline = request.terms.deadline or Deadline()
    limits = (deadline.total_s, None if has_token else deadline.first_token_s)
    return request.arrival_s + min((limit for limit in limits if limit is not None), default=UNBOUNDED_S)
