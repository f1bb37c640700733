"""Overload: whether the queue has room for a request, and after which time a rejected one is told to try again.

    │ running: seats │ waiting: at most max_queue sequences, max_queue_tokens tokens and max_queue_bytes │ rejected

`place_s` predicts when seats come free, by the output that the running sequences are expected to give yet and by the
time that steps take, both as measured. A rejected request is told how long a request at the end of the queue waits.
"""

from __future__ import annotations

import math

from quire.scheduler.budget import long_threshold
from quire.scheduler.sequence import Sequence
from quire.scheduler.state import SchedulerState

MARGIN = 1.25  # of the time told: the pace varies
LEAST_S = 0.75  # told beside the margin
ASSUMED_STEP_S = 0.05  # until a step was measured


def place_s(state: SchedulerState, number: int) -> float:
    """Return the seconds until the ``number``-th sequence (from 1) of the queue finds a seat."""
    seats, typical_s, *_ = seats_of(state)
    turns, index = divmod(max(1, number) - 1, len(seats))
    return seats[index] + turns * typical_s


def full_queue(state: SchedulerState, num_prompt: int, num_bytes: int) -> tuple[str, float] | None:
    """Return (text, predicted wait of the whole queue in seconds) where it has no room for a request of this size."""
    config, queue = state.config, state.waiting
    num_waiting, num_tokens = len(queue) + len(state.loading), queue.num_tokens
    most_tokens, most_bytes = config.max_queue_tokens, config.max_queue_bytes
    if num_waiting >= config.max_queue:
        why = f"{num_waiting} sequences wait and at most {config.max_queue} may."
    elif not num_waiting:
        return None
    elif most_tokens is not None and num_tokens + num_prompt > most_tokens:
        why = f"prompts of {num_tokens} tokens wait and of at most {most_tokens} tokens may."
    elif most_bytes is not None and queue.num_bytes + num_bytes > most_bytes:
        why = f"requests of {queue.num_bytes} bytes wait and of at most {most_bytes} bytes may."
    else:
        return None
    return f"The queue is full: {why}", place_s(state, num_waiting + 1)


def retry_after_s(wait_s: float) -> float:
    """Return the whole seconds after which the client of a rejected request is to try again."""
    return float(math.ceil(wait_s * MARGIN + LEAST_S))


def seats_of(state: SchedulerState) -> tuple[list[float], float, int, int]:
    """Return when each seat is free, the earliest first, for how long one is taken, and the prompt tokens to compute.

    Times are seconds from now; the tokens are of those that run, of short prompts and of long ones. Free seats are as
    many as max_num_seqs and the free blocks allow. Computed once per step: a burst of requests that are rejected reads
    the same.
    """
    threshold = long_threshold(state.config)
    stamp = (state.next_step, len(state.running), len(state.in_flight), threshold)
    if state.seats is not None and state.seats[0] == stamp:
        return state.seats[1:]
    predictor, running = state.predictor, state.running
    step_s, mean = predictor.step_s or ASSUMED_STEP_S, predictor.mean_output
    sample = state.waiting.first(64) or running  # of those that run, long outputs are the more frequent
    typical = sum(_num_left(seq, mean, whole=True) for seq in sample) / len(sample) if sample else mean
    free = state.config.max_num_seqs - len(running)
    if running:
        num_tokens = sum(seq.num_prompt for seq in running) / len(running) + typical
        need = math.ceil(num_tokens / state.cache.block_size) * state.cache.windows.num_groups
        free = min(free, state.cache.references.num_available // need)
    taken = sorted(
        _num_left(seq, mean) * step_s + max(0, seq.num_prompt - seq.num_planned) * predictor.prompt_token_s
        for seq in running
    )
    left = [max(0, seq.num_total - seq.num_planned - 1) for seq in running]
    num_long = sum(num for num in left if num > threshold > 0)
    seats = [0.0] * max(0, free) + taken or [0.0]
    state.seats = (stamp, seats, max(1.0, typical) * step_s, sum(left) - num_long, num_long)
    return state.seats[1:]


def _num_left(seq: Sequence, mean: float, *, whole: bool = False) -> float:
    """Return the output tokens that a sequence is expected to give yet, or in all. ``mean``: of others; 0: unknown."""
    done = 0 if whole else len(seq.token_ids) - seq.num_prompt
    most = max(1, seq.max_total - seq.num_prompt - done)
    if not mean or not (seq.stop_ids or seq.sampling.stop):
        return most
    return max(1.0, min(most, max(mean - done, mean / 4)))
