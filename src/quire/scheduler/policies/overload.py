"""Overload: whether the queue has room for a request, whether its first token comes in time, and when to try again.

    │ running: seats │ waiting: at most max_queue sequences, max_queue_tokens tokens and max_queue_bytes │ rejected

A first token is predicted from the prompts before it and from the time at which a seat comes free (`seats`), as
measured. A request that would miss a limit is rejected at once, and told how long one at the end of the queue waits.
On from the first request that finds the queue full, or that has a limit: a queue with room asks nothing of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from quire.metrics.engine_stats import long_beside
from quire.request import Request
from quire.scheduler.policies.earliest_deadline import due_s
from quire.scheduler.policies.order import aged_s
from quire.scheduler.policies.seats import Seats, least_output
from quire.scheduler.policy import Policy, Refusal
from quire.scheduler.sequence import Sequence, held_bytes
from quire.scheduler.settings import long_threshold
from quire.scheduler.state import SchedulerState

MARGIN = 1.25  # factor on the time told: the pace varies
LEAST_S = 0.75  # told beside the margin


class Rule(Policy):
    """Rejects what has no room or would come too late."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._seats = Seats(state)

    def admit(self, request: Request, now: float) -> Refusal | None:
        full = self._full_queue(len(request.prompt_token_ids), held_bytes(request))
        late = ("capacity", *full) if full is not None else self._too_late(request, now)
        if late is None:
            return None
        kind, text, after_s = late
        wait_s = float(math.ceil(after_s * MARGIN + LEAST_S))
        return Refusal(kind, f"{text} Try again in {wait_s:g} s.", wait_s)

    def _full_queue(self, num_prompt: int, num_bytes: int) -> tuple[str, float] | None:
        """Return (text, predicted wait of the whole queue in seconds) where there is no room for this size."""
        config, queue, transfers = self._state.config, self._state.waiting, self._state.policies.transfers
        num_waiting = len(queue) + (0 if transfers is None else len(transfers.loading))
        most_tokens, most_bytes = config.max_queue_tokens, config.max_queue_bytes
        if num_waiting >= config.max_queue:
            why = f"{num_waiting} sequences wait and at most {config.max_queue} may."
        elif not num_waiting:
            return None
        elif most_tokens is not None and queue.num_tokens + num_prompt > most_tokens:
            why = f"prompts of {queue.num_tokens} tokens wait and of at most {most_tokens} tokens may."
        elif most_bytes is not None and queue.num_bytes + num_bytes > most_bytes:
            why = f"requests of {queue.num_bytes} bytes wait and of at most {most_bytes} bytes may."
        else:
            return None
        return f"The queue is full: {why}", self._seats.place_s(num_waiting + 1)

    def _too_late(self, request: Request, now: float) -> tuple[str, str, float] | None:
        """Return (error kind, text, seconds until it could) where ``request`` would miss a limit, as things go.

        An idle engine, and one that has not measured a step, tries everything.
        """
        state = self._state
        limits = [*self._limits(request)]
        if not limits or not state.predictor.step_s or not (state.running or state.waiting):
            return None
        elapsed_s, num_own = now - request.arrival_s, self._num_uncached(request)
        ahead = (seq.num_total for seq in state.waiting if self._is_ahead(seq, request))
        line = Line.of(ahead, num_own, long_threshold(state.config))
        first_s = elapsed_s + self._first_s(line, num_own)
        more_s = (least_output(request) - 1) * state.predictor.step_s
        for name, kind, limit_s in limits:
            expected_s = first_s + more_s * (name == "deadline_ms.total")
            if expected_s > limit_s:
                return kind, self._missed_text(name, limit_s, expected_s), expected_s - limit_s
        return None

    def _limits(self, request: Request) -> Iterator[tuple[str, str, float]]:
        """Yield (name, error kind, seconds from arrival) of each limit."""
        if request.terms.deadline is not None:
            for name, limit_s in (
                ("first_token", request.terms.deadline.first_token_s),
                ("total", request.terms.deadline.total_s),
            ):
                if limit_s is not None:
                    yield f"deadline_ms.{name}", "hopeless", limit_s
        if self._state.config.max_ttft_s is not None:
            yield "max_ttft_ms", "capacity", self._state.config.max_ttft_s

    def _missed_text(self, name: str, limit_s: float, expected_s: float) -> str:
        state = self._state
        return (
            f"{name} = {limit_s * 1e3:g} cannot be met: {len(state.running)} sequences run and "
            f"{len(state.waiting)} wait, and as things go it would take about {expected_s * 1e3:.0f} ms."
        )

    def _first_s(self, line: Line, num_own: int) -> float:
        """Return in how many seconds ``num_own`` tokens behind the running prompts and ``line`` give a first token."""
        state, times = self._state, self._seats.times()
        share, threshold = state.counters.uncached_share, long_threshold(state.config)
        num_tokens = times.num_tokens + int(line.num_tokens * share)
        num_long = times.num_long + int(line.num_long * share)
        if num_own > threshold:
            num_tokens += num_long
        else:
            chunk = state.config.max_num_batched_tokens
            num_tokens += long_beside(threshold, num_tokens + num_own, num_long, chunk)
        wait_s = self._seats.place_s(line.num_seqs + 1)
        return state.predictor.first_token_s(num_tokens, wait_s, num_own)

    def _is_ahead(self, seq: Sequence, request: Request) -> bool:
        """Tell whether ``seq``, which waits, enters before ``request`` (under longest-prefix: taken to)."""
        order = self._state.config.order
        if order == "priority":
            return aged_s(seq.group.request) <= aged_s(request)
        if order == "shortest-first":
            return seq.num_prompt <= len(request.prompt_token_ids)
        if order == "deadline":
            return not seq.late and due_s(seq.group.request, has_token=False) <= due_s(
                request, has_token=False
            )
        return True

    def _num_uncached(self, request: Request) -> int:
        """Return the tokens of its own prompt without those that the prefix tree has now."""
        table = self._state.new_table(request)
        num_cached = self._state.cache.match(table, request.prompt_token_ids).num_tokens
        return len(request.prompt_token_ids) - num_cached


class Line(NamedTuple):
    """Sequences that enter before a request, and the tokens of their prompts.

    A short request has ``num_long`` tokens of long prompts apart, which hold it by a part of each step alone, and of
    their sequences at most one, since the others are passed over (`long_prompts`).
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
