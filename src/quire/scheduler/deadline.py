"""Deadlines: a request that cannot meet its own any more is rejected at once; a sequence that missed it is ended.

    add      it would miss a limit as things go: rejected, with when to try again
    plan     `expire`, first of all: a limit has passed → the sequence ends with `FinishReason.DEADLINE`
    apply    a first token that comes too late ends its sequence likewise

Both are functions of ``now`` and of what the scheduler measured, so a simulated run decides as the real one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from quire.config import OrderKind
from quire.metrics.engine_stats import long_beside
from quire.request import FinishReason, Request, TokenEvent
from quire.scheduler.budget import long_threshold
from quire.scheduler.overload import place_s, seats_of
from quire.scheduler.predictor import Backlog
from quire.scheduler.queue import aged_s, due_s, sort_key
from quire.scheduler.sequence import RequestState, Sequence, SequenceState
from quire.scheduler.state import SchedulerState

_LOOKAHEAD = 128  # waiting sequences that `demote` looks at per step


class Line(NamedTuple):
    """Sequences that enter before a request, and the tokens of their prompts.

    A short request has ``num_long`` tokens of long prompts apart, which hold it by a part of each step alone, and of
    their sequences at most one, since the others are passed over (`quire.scheduler.long_prompts`).
    """

    num_seqs: int
    num_tokens: int
    num_long: int = 0

    @classmethod
    def of(cls, lengths: Iterable[int], num_own: int, threshold: int) -> Line:
        """Return the line of prompts of these lengths before a request with ``num_own`` tokens to compute."""
        short = all_lengths = list(lengths)
        if num_own <= threshold > 0:
            short = [num for num in all_lengths if num <= threshold]
        num_long = sum(all_lengths) - sum(short)
        return cls(len(short) + (num_long > 0), sum(short), num_long)


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


def too_late(state: SchedulerState, request: Request, now: float) -> tuple[str, str, float] | None:
    """Return (error kind, text, seconds until it could) where ``request`` would miss a limit, as things go.

    An idle engine, and one that has not measured a step, tries everything.
    """
    limits = [*_limits(state, request)]
    if not limits or not state.predictor.step_s or not (state.running or state.waiting):
        return None
    elapsed_s, num_own = now - request.arrival_s, _num_uncached(state, request)
    ahead = (seq.num_total for seq in state.waiting if _is_ahead(state.config.order, seq, request))
    line = Line.of(ahead, num_own, long_threshold(state.config))
    first_s = elapsed_s + _first_s(state, line, num_own)
    more_s = (_least_output(request) - 1) * state.predictor.step_s
    for name, kind, limit_s in limits:
        expected_s = first_s + more_s * (name == "deadline_ms.total")
        if expected_s > limit_s:
            return kind, _missed_text(state, name, limit_s, expected_s), expected_s - limit_s
    return None


def demote(state: SchedulerState, now: float) -> None:
    """Under the order "deadline": rank the sequences that cannot meet their limits any more behind all others.

    They run where nothing else wants their place, and end when their limit passes.
    """
    for seq in (*state.running, *state.waiting.first(_LOOKAHEAD)):
        if seq.late or seq.group.request.deadline is None or not _misses(state, seq, now):
            continue
        waits = seq.state is SequenceState.WAITING
        if waits:
            state.waiting.remove(seq)
        seq.late = True
        seq.key = sort_key(state.config.order, seq)
        if waits:
            state.waiting.add(seq)


def _misses(state: SchedulerState, seq: Sequence, now: float) -> bool:
    """Tell whether a sequence would miss a limit if all steps from now on had it."""
    pace, request, deadline = state.predictor, seq.group.request, seq.group.request.deadline
    assert deadline is not None
    num_left = max(0, seq.num_prompt - seq.num_planned) * _uncached_share(state)
    first_s = now - request.arrival_s + max(num_left * pace.prompt_token_s, pace.step_s)
    if deadline.first_token_s is not None and seq.ttft_s is None and first_s > deadline.first_token_s:
        return True
    num_outputs = max(0, _least_output(request) - (len(seq.token_ids) - seq.num_prompt) - 1)
    return deadline.total_s is not None and first_s + num_outputs * pace.step_s > deadline.total_s


def predict_ttft(state: SchedulerState, group: RequestState) -> None:
    """Note when the first token of a request that just came is predicted; the predictor learns from what comes."""
    if state.predictor.step_time is None:
        return
    config, threshold = state.config, long_threshold(state.config)
    decoding = [seq for seq in state.running if seq.told_first]
    ahead = [
        seq.num_prompt
        for seq in (*state.running, *state.waiting)
        if not seq.told_first and seq.group is not group
    ]
    stats = state.predictor.ttft_stats(len(decoding), config.max_num_batched_tokens, threshold)
    num_long = sum(num for num in ahead if num > threshold > 0)
    num_prompt, is_busy = len(group.request.prompt_token_ids), bool(decoding or ahead)
    group.predicted_s = stats.seconds(sum(ahead) - num_long, num_prompt, busy=is_busy, num_long=num_long)


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


def _limits(state: SchedulerState, request: Request) -> Iterator[tuple[str, str, float]]:
    """Yield (name, error kind, seconds from arrival) of each limit."""
    if request.deadline is not None:
        for name, limit_s in (
            ("first_token", request.deadline.first_token_s),
            ("total", request.deadline.total_s),
        ):
            if limit_s is not None:
                yield f"deadline_ms.{name}", "hopeless", limit_s
    if state.config.max_ttft_s is not None:
        yield "max_ttft_ms", "capacity", state.config.max_ttft_s


def _missed_text(state: SchedulerState, name: str, limit_s: float, expected_s: float) -> str:
    return (
        f"{name} = {limit_s * 1e3:g} cannot be met: {len(state.running)} sequences run and "
        f"{len(state.waiting)} wait, and as things go it would take about {expected_s * 1e3:.0f} ms."
    )


def _first_s(state: SchedulerState, line: Line, num_own: int) -> float:
    """Return in how many seconds ``num_own`` tokens behind the running prompts and ``line`` give a first token."""
    share, threshold = _uncached_share(state), long_threshold(state.config)
    *_, num_tokens, num_long = seats_of(state)
    num_tokens += int(line.num_tokens * share)
    num_long += int(line.num_long * share)
    if num_own > threshold:
        num_tokens += num_long
    else:
        chunk = state.config.max_num_batched_tokens
        num_tokens += long_beside(threshold, num_tokens + num_own, num_long, chunk)
    backlog = Backlog(num_tokens, place_s(state, line.num_seqs + 1))
    return state.predictor.first_token_s(backlog, num_own)


def _uncached_share(state: SchedulerState) -> float:
    """Return the share of prompt tokens that had to be computed so far."""
    known = state.counters.num_prompt_tokens
    return 1.0 - state.counters.num_cached_tokens / known if known else 1.0


def _is_ahead(order: OrderKind, seq: Sequence, request: Request) -> bool:
    """Tell whether ``seq``, which waits, enters before ``request`` (under longest-prefix: taken to)."""
    if order == "priority":
        return aged_s(seq.group.request) <= aged_s(request)
    if order == "shortest-first":
        return seq.num_prompt <= len(request.prompt_token_ids)
    if order == "deadline":
        return not seq.late and due_s(seq.group.request, has_token=False) <= due_s(request, has_token=False)
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
