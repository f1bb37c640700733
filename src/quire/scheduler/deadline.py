"""Deadlines: a request that cannot meet its own any more is rejected at once; a sequence that missed it is ended.

    add      hopeless as things go: refused, "hopeless" and when to come again
    plan     `expire`, first of all: a limit has passed → the sequence ends with `FinishReason.DEADLINE`
    apply    a first token that comes too late ends its sequence likewise

Both are functions of ``now`` and of what the scheduler measured, so a simulated run decides as the real one.
"""

from __future__ import annotations

from quire.config import OrderKind
from quire.request import FinishReason, Request, TokenEvent
from quire.scheduler.predictor import Backlog
from quire.scheduler.sequence import RequestState, Sequence
from quire.scheduler.state import SchedulerState


def expire(state: SchedulerState, now: float) -> list[TokenEvent]:
    """End the sequences whose limits have passed. Called before each plan."""
    events = []
    requests: dict[str, Request] = {}
    for request_id in state.deadlines.due(now):
        group = state.requests.get(request_id)
        if group is None:
            continue
        requests[request_id] = group.request
        # Last first, so that siblings go before the leader that they are attached to.
        for seq in reversed(tuple(group.sequences)):
            missed = _missed(seq, now)
            if missed is not None:
                events.append(end_late(state, seq, missed))
    # Beams are more than their request has answers.
    return [e for e in events if e.sample_index < requests[e.request_id].sampling.num_samples]


def end_late(state: SchedulerState, seq: Sequence, missed: str) -> TokenEvent:
    """End a sequence that missed the limit named ``missed``."""
    deadline = seq.group.request.deadline
    assert deadline is not None
    text = deadline.missed(missed, len(seq.token_ids) - seq.num_prompt)
    return state.end(seq, FinishReason.DEADLINE, error=text, error_kind="deadline")


def is_late(seq: Sequence) -> bool:
    """Tell whether the first token, which just came, came too late."""
    deadline = seq.group.request.deadline
    if deadline is None or deadline.first_token_s is None or seq.group.request.output_token_ids:
        return False
    return seq.ttft_s is not None and seq.ttft_s > deadline.first_token_s


def hopeless(state: SchedulerState, request: Request, now: float) -> tuple[str, float] | None:
    """Return (text, seconds after which to try again) where ``request`` would miss its deadline, as things go.

    An idle engine tries everything, and so does one that takes a request over from a dead one.
    """
    deadline = request.deadline
    if deadline is None or request.output_token_ids or not (state.running or state.waiting):
        return None
    first_s = (
        now
        - request.arrival_s
        + state.predictor.first_token_s(_backlog(state, request), _num_uncached(state, request))
    )
    last_s = first_s + (_least_output(request) - 1) * state.predictor.step_s
    for name, limit_s, expected_s in (
        ("first_token", deadline.first_token_s, first_s),
        ("total", deadline.total_s, last_s),
    ):
        if limit_s is not None and expected_s > limit_s:
            text = (
                f"deadline_ms.{name} = {limit_s * 1e3:g} cannot be met: {len(state.running)} sequences run and "
                f"{len(state.waiting)} wait, and as things go it would take about {expected_s * 1e3:.0f} ms. Try again "
                "later, or allow more."
            )
            return text, expected_s - limit_s
    return None


def predict_ttft(state: SchedulerState, group: RequestState) -> None:
    """Note when the first token of a request that just came is predicted; the predictor learns from what comes."""
    if state.predictor.step_time is None:
        return
    decoding = [seq for seq in state.running if seq.told_first]
    ahead = [seq for seq in (*state.running, *state.waiting) if not seq.told_first and seq.group is not group]
    stats = state.predictor.ttft_stats(len(decoding), state.config.max_num_batched_tokens)
    num_ahead = sum(seq.num_prompt for seq in ahead)
    num_prompt = len(group.request.prompt_token_ids)
    group.predicted_s = stats.seconds(num_ahead, num_prompt, busy=bool(decoding or ahead))


def _missed(seq: Sequence, now: float) -> str | None:
    request = seq.group.request
    deadline = request.deadline
    assert deadline is not None
    total_s, first_s = deadline.total_s, deadline.first_token_s
    if total_s is not None and now >= request.arrival_s + total_s:  # the same sum as in `Deadlines`
        return "total"
    has_token = len(seq.token_ids) > seq.num_prompt and not seq.is_beam  # beams give all at their end
    if first_s is not None and now >= request.arrival_s + first_s and not has_token:
        return "first_token"
    return None


def _backlog(state: SchedulerState, request: Request) -> Backlog:
    """What comes before ``request``: the rest of the prompts that run, and those that wait ahead of it in order."""
    ahead = [seq for seq in state.waiting if _is_ahead(state.config.order, seq, request)]
    known = state.counters.num_prompt_tokens
    uncached = 1.0 - state.counters.num_cached_tokens / known if known else 1.0
    num_tokens = sum(max(0, seq.num_total - seq.num_planned - 1) for seq in state.running)
    num_tokens += int(sum(seq.num_total for seq in ahead) * uncached)
    num_free = state.config.max_num_seqs - len(state.running)
    return Backlog(num_tokens, max(0, len(ahead) + 1 - num_free))


def _is_ahead(order: OrderKind, seq: Sequence, request: Request) -> bool:
    """Tell whether ``seq``, which waits, enters before ``request`` (under longest-prefix: taken to)."""
    if order == "priority":
        return seq.group.request.priority <= request.priority
    if order == "shortest-first":
        return seq.num_prompt <= len(request.prompt_token_ids)
    return True


def _num_uncached(state: SchedulerState, request: Request) -> int:
    """Tokens of its own prompt, without those that the prefix tree has now."""
    table = state.new_table(request)
    return len(request.prompt_token_ids) - state.cache.match(table, request.prompt_token_ids).num_tokens


def _least_output(request: Request) -> int:
    """Output tokens that it has at the least: where nothing can end it early, max_tokens."""
    sampling = request.sampling
    may_stop = sampling.eos_token_ids or sampling.stop_token_ids or sampling.stop
    return max(1, sampling.min_tokens if may_stop else sampling.max_tokens or 1)
