"""A request becomes its n sequences, or a refusal that says why with the numbers."""

from __future__ import annotations

from quire.request import FinishReason, Request, SampleTiming, TokenEvent
from quire.scheduler.beam_steps import start_search
from quire.scheduler.deadline import predict_ttft, too_late
from quire.scheduler.outcome import finish_reason
from quire.scheduler.overload import full_queue, retry_after_s
from quire.scheduler.queue import sort_key
from quire.scheduler.sequence import RequestState, Sequence, SequenceState, held_bytes
from quire.scheduler.state import SchedulerState


def add_request(state: SchedulerState, request: Request, now: float) -> list[TokenEvent]:
    """Queue the sequences of ``request``. The events: refusals, or ends that a restarted engine had still to tell."""
    assert request.request_id not in state.requests, f"request id {request.request_id!r} is in use"
    assert request.prompt_token_ids, "a request has at least one token"
    sampling = request.sampling
    indexes = [i for i in range(sampling.num_samples) if i not in request.finished_samples]
    state.counters.num_requests += 1
    refusal = _refusal(state, request, now)
    if refusal is not None:
        kind, text, retry_after_s = refusal
        state.counters.num_refused += 1
        return [refused(request, index, kind, text, now, retry_after_s) for index in indexes]
    group = RequestState(request)
    for index in range(sampling.beam_width) if sampling.use_beam_search and indexes else indexes:
        _new_sequence(state, group, index)
    if not group.sequences:
        return []
    state.requests[request.request_id] = group
    predict_ttft(state, group)
    if len(request.prompt_token_ids) <= state.config.long_prefill_token_threshold:
        state.last_short_s = now
    state.deadlines.add(request)
    if sampling.use_beam_search:
        start_search(state, group)
        return []
    # After a restart each sample has an output of its own: it is computed again by itself, through the prefix tree.
    leaders = list(group.sequences)
    if not any(request.output_token_ids) and not request.finished_samples:
        leader = leaders[0]
        leader.siblings = leaders[1:]
        for sibling in leader.siblings:
            sibling.state = SequenceState.ATTACHED
        leaders = [leader]
    events = []
    for seq in leaders:
        state.enqueue(seq)
        reason = finish_reason(seq, seq.token_ids[-1]) if len(seq.token_ids) > seq.num_prompt else None
        if reason is not None:
            stop_id = seq.token_ids[-1] if reason is FinishReason.STOP else None
            events.append(state.end(seq, reason, stop_token_id=stop_id))
    return events


def refused(
    request: Request, sample_index: int, kind: str, text: str, now: float, retry_after_s: float = 0.0
) -> TokenEvent:
    """Return the terminal event of a sample that never entered."""
    return TokenEvent(
        request.request_id,
        sample_index,
        finish_reason=FinishReason.ERROR,
        error=text,
        error_kind=kind,
        timing=SampleTiming(queued_s=max(0.0, now - request.arrival_s)),
        retry_after_s=retry_after_s,
    )


def _new_sequence(state: SchedulerState, group: RequestState, sample_index: int) -> None:
    request = group.request
    table = state.new_table(request)
    seq = Sequence(state.next_seq_id, group, sample_index, table, state.config.max_model_len)
    seq.key = sort_key(state.config.order, seq)
    state.next_seq_id += 1
    state.sequences[seq.seq_id] = seq
    state.shares.join(request.tenant)
    seq.num_charged = len(seq.token_ids)
    group.sequences.append(seq)


def _refusal(state: SchedulerState, request: Request, now: float) -> tuple[str, str, float] | None:
    """Return (error_kind, text, seconds after which to try again or 0) where the request cannot be taken."""
    never = _never_fits(state, request)
    if never is not None:
        return "never_fits", never, 0.0
    if request.output_token_ids:  # it was admitted before the engine was restarted
        return None
    full = full_queue(state, len(request.prompt_token_ids), held_bytes(request))
    late = ("capacity", *full) if full is not None else too_late(state, request, now)
    if late is None:
        return None
    kind, text, after_s = late
    wait_s = retry_after_s(after_s)
    return kind, f"{text} Try again in {wait_s:g} s.", wait_s


def _never_fits(state: SchedulerState, request: Request) -> str | None:
    """Tell why the request could not run even alone."""
    config = state.config
    num_prompt = len(request.prompt_token_ids)
    if request.adapter is not None and state.adapters.num_slots == 0:
        return (
            f"The request wants the adapter {request.adapter.name!r}, and this engine has no room for adapters: start "
            "it with --max-loras."
        )
    if num_prompt + (not request.prompt_only) > config.max_model_len:
        return (
            f"The prompt has {num_prompt} tokens; this model's context is {config.max_model_len} tokens for prompt and "
            "output together. Shorten the prompt."
        )
    if not config.enable_chunked_prefill and num_prompt > config.max_num_batched_tokens:
        return (
            f"The prompt has {num_prompt} tokens; without chunked prefill a step takes at most "
            f"{config.max_num_batched_tokens}. Raise max_num_batched_tokens or enable chunked prefill."
        )
    return _too_large(state, request)


def _too_large(state: SchedulerState, request: Request) -> str | None:
    """Tell whether one sequence of the request would need more blocks than the whole pool has."""
    config, cache = state.config, state.cache
    num_prompt = len(request.prompt_token_ids)
    max_tokens = request.sampling.max_tokens
    longest = (
        config.max_model_len if max_tokens is None else min(num_prompt + max_tokens, config.max_model_len)
    )
    num_rows = num_prompt if request.prompt_only else longest - 1
    chunk = 1 if config.enable_chunked_prefill else num_rows
    num_blocks = cache.windows.lifetime_blocks(num_rows, chunk)
    if num_blocks <= cache.pool.num_blocks:
        return None
    return (
        f"The request can grow to {longest} tokens ({num_prompt} prompt + {longest - num_prompt} output) and would "
        f"then need {num_blocks} KV blocks of {cache.block_size} tokens; there are {cache.pool.num_blocks} in all. "
        "Lower max_tokens, shorten the prompt, or give the server more --kv-memory."
    )
