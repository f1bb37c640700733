"""`Admission`: a request becomes its n sequences, or a refusal that says why with the numbers."""

from __future__ import annotations

from quire.request import NO_TENANT, FinishReason, Request, SampleTiming, TokenEvent
from quire.scheduler.outcome import finish_reason
from quire.scheduler.policies import wanted_by_request
from quire.scheduler.policy import Refusal
from quire.scheduler.sequence import RequestState, Sequence, SequenceState, held_bytes
from quire.scheduler.state import SchedulerState


class Admission:
    """Takes the requests of one scheduler."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def add(self, request: Request, now: float) -> list[TokenEvent]:
        """Queue the sequences of ``request``. Return refusals, or ends that a restarted engine had still to tell."""
        state, sampling = self._state, request.sampling
        assert request.request_id not in state.requests, f"request id {request.request_id!r} is in use"
        assert request.prompt_token_ids, "a request has at least one token"
        indexes = [i for i in range(sampling.num_samples) if i not in request.finished_samples]
        state.counters.num_requests += 1
        terms, spans = request.terms, request.spans
        if terms.deadline is not None or terms.tenant != NO_TENANT or sampling.use_beam_search or spans:
            for name in wanted_by_request(request):
                state.policies.turn_on(name)
        refusal = self._refusal(request, now)
        if refusal is not None:
            state.counters.num_refused += 1
            kind, text, later_s = refusal.kind, refusal.text, refusal.retry_after_s
            return [refused(request, index, kind, text, now, later_s) for index in indexes]
        group = RequestState(request)
        for index in range(sampling.beam_width) if sampling.use_beam_search and indexes else indexes:
            self._new_sequence(group, index)
        if not group.sequences:
            return []
        state.requests[request.request_id] = group
        for on_add in state.policies.on_add:
            on_add(group)
        if sampling.use_beam_search:
            state.policies.beams.start(group)
            return []
        return self._enqueue(group)

    def _enqueue(self, group: RequestState) -> list[TokenEvent]:
        """Let the sequences of a request wait, or one for all; return the ends of those that are complete."""
        request, state = group.request, self._state
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

    def _new_sequence(self, group: RequestState, sample_index: int) -> None:
        state, request = self._state, group.request
        table = state.new_table(request)
        seq = Sequence(state.next_seq_id, group, sample_index, table, state.config.max_model_len)
        state.rank((seq,))
        state.next_seq_id += 1
        state.sequences[seq.seq_id] = seq
        group.sequences.append(seq)

    def _refusal(self, request: Request, now: float) -> Refusal | None:
        """Return why a request cannot be taken, or None."""
        never, state = self._never_fits(request), self._state
        if never is not None:
            return Refusal("never_fits", never)
        if request.output_token_ids:  # it was admitted before the engine was restarted
            return None
        transfers = state.policies.transfers
        num_loading = 0 if transfers is None else len(transfers.loading)
        num_prompt = len(request.prompt_token_ids)
        num_bytes = 0 if state.config.max_queue_bytes is None else held_bytes(request)
        if state.waiting.is_full(state.config, num_loading, num_prompt, num_bytes):
            state.policies.turn_on("overload")
        for admit in state.policies.admit:
            refusal = admit(request, now)
            if refusal is not None:
                return refusal
        return None

    def _never_fits(self, request: Request) -> str | None:
        """Tell why the request could not run even alone."""
        config = self._state.config
        num_prompt = len(request.prompt_token_ids)
        if request.adapter is not None and config.max_loras == 0:
            return (
                f"The request wants the adapter {request.adapter.name!r}, and this engine has no room for adapters: "
                "start it with --max-loras."
            )
        if num_prompt + (not request.prompt_only) > config.max_model_len:
            return (
                f"The prompt has {num_prompt} tokens; this model's context is {config.max_model_len} tokens for prompt "
                "and output together. Shorten the prompt."
            )
        if not config.enable_chunked_prefill and num_prompt > config.max_num_batched_tokens:
            return (
                f"The prompt has {num_prompt} tokens; without chunked prefill a step takes at most "
                f"{config.max_num_batched_tokens}. Raise max_num_batched_tokens or enable chunked prefill."
            )
        return self._too_large(request)

    def _too_large(self, request: Request) -> str | None:
        """Tell whether one sequence of the request would need more blocks than the whole pool has."""
        config, cache = self._state.config, self._state.cache
        num_prompt, limit = len(request.prompt_token_ids), config.max_model_len
        max_tokens = request.sampling.max_tokens
        longest = limit if max_tokens is None else min(num_prompt + max_tokens, limit)
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
