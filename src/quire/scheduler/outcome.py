"""`Outcome`: `StepResult` → sequences, blocks and `TokenEvent`s: tokens are appended, and ends found.

It also counts what sequences cost:

    engine_s      The time of a step is shared by its scheduled tokens: prompt tokens, decodes and drafts alike. Steps
                  in flight wait for each other, so no second is counted twice.
    kv_block_s    A sequence is charged for every block of its table while it runs. A block that several sequences
                  share counts for each of them, so that a sequence costs the same whatever runs beside it.

`EngineStats.busy_s` is the ``engine_s`` of all sequences and `EngineStats.unshared_s`: the share of sequences that had
ended while the step was in flight, and whose last event had gone out.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from dataclasses import replace
from operator import attrgetter

from quire.request import FinishReason, TokenEvent, TokenLogprobs
from quire.scheduler.failures import Failures, in_order
from quire.scheduler.sequence import Sequence, StepRecord
from quire.scheduler.state import SchedulerState
from quire.step import MIN_RETRY_TOKENS, SeqPlan, SeqResult, StepResult

_seq_id = attrgetter("seq_id")
_error = attrgetter("error")


class Outcome:
    """Applies the results of one scheduler's steps."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._failures = Failures(state)

    def apply(self, result: StepResult, now: float) -> list[TokenEvent]:
        """Apply the result of the oldest step in flight."""
        state = self._state
        record = state.in_flight.popleft()
        assert record.step == result.step, "results come in order of submission"
        state.now = now
        token_s = self._share_step(record, now)
        if result.max_tokens is not None:
            # Until a change of settings raises it.
            budget = min(state.config.max_num_batched_tokens, max(result.max_tokens, MIN_RETRY_TOKENS))
            state.config = replace(state.config, max_num_batched_tokens=budget)
        if result.error is not None:
            state.predictor.note_failure(now)
            return self._failures.fail_step(record, result.error, token_s)
        results = result.seqs
        if [*map(_seq_id, results)] != [*map(_seq_id, record.seqs)]:
            results = in_order(record, results)
        events: list[TokenEvent] = []
        if [*map(_error, results)].count(None) < len(results):
            events = self._failures.fail_sequences(record, results, token_s)
            token_s = 0.0
        else:
            state.cache.references.close_step(record.step)
        if result.transfers_done:
            state.policies.transfers.end(result.transfers_done)
        self._apply_sequences(record, results, now, token_s, events)
        took_s = state.predictor.note(
            record.seqs, record.planned_s, now, num_prompt_tokens=record.num_prompt_tokens
        )
        for on_step in state.policies.on_step:
            on_step(record, result, took_s)
        return events

    def _apply_sequences(
        self,
        record: StepRecord,
        results: SequenceABC[SeqResult],
        now: float,
        token_s: float,
        events: list[TokenEvent],
    ) -> None:
        """Append tokens, settle blocks, find ends: the engine's other hot loop is `Planner._emit_decodes`."""
        counters, add_event = self._state.counters, events.append
        num_zombies = num_events = num_generated = 0
        for seq, plan, result in zip(record.sequences, record.seqs, results, strict=True):
            if seq.epoch != plan.epoch:  # a zombie: it ended or was preempted meanwhile
                num_zombies += 1
                self._failures.charge(seq, token_s * plan.num_scheduled_tokens)
                continue
            known, token_ids = seq.token_ids, result.token_ids
            if len(known) < seq.next_event_at and len(token_ids) == 1 and token_ids[0] not in seq.stop_ids:
                known.append(token_ids[0])
                seq.num_steps += 1
                seq.engine_s += token_s
                if seq.has_stop_strings:
                    timing = seq.timing(now)
                    event = TokenEvent(
                        seq.request_id, seq.sample_index, token_ids, result.logprobs, timing=timing
                    )
                    add_event(event)
                else:
                    add_event(TokenEvent(seq.request_id, seq.sample_index, token_ids, result.logprobs))
            else:
                num_events += 1
                seq.engine_s += token_s * plan.num_scheduled_tokens
                num_generated += self._apply_one(seq, plan, result, now, events)
        counters.num_zombie_results += num_zombies
        num_plain = len(record.sequences) - num_zombies - num_events
        counters.num_generated_tokens += num_plain + num_generated

    def _apply_one(
        self, seq: Sequence, plan: SeqPlan, result: SeqResult, now: float, events: list[TokenEvent]
    ) -> int:
        """Apply one result, whatever there is to do; return how many of its tokens count as generated now."""
        state = self._state
        end = plan.num_computed_tokens + plan.num_scheduled_tokens
        if result.prompt_logprobs:
            events.append(_scored(seq, end, result.prompt_logprobs))
        if seq.is_beam and result.token_ids:
            state.cache.settle(seq.table, seq.token_ids, end)  # the next token is not known yet
            events += state.policies.beams.take(seq, end, result.logprobs)
            return 0  # tokens of beams are counted when the search is answered
        if result.token_ids and state.policies.drafts is not None:
            state.policies.drafts.note(seq, plan, result)
        token_ids, reason = _append(seq, result.token_ids)
        if result.token_ids:
            num_rejected = 1 + plan.num_draft_tokens - len(token_ids)
            assert 0 <= num_rejected <= plan.num_draft_tokens
            end -= num_rejected
            if num_rejected:
                state.rollback(seq, num_rejected)
        state.cache.settle(seq.table, seq.token_ids, end)
        if state.cache.windows.sliding or plan.num_draft_tokens:
            seq.note_blocks(now)
        seq.num_steps += 1
        if not token_ids:
            seq.num_chunks += 1
            if seq.prompt_only and end == seq.num_prompt:
                events.append(self._end_prompt(seq, result.pooled))
            return 0
        is_first, seq.told_first = not seq.told_first, True
        if is_first:
            seq.num_chunks += 1
            if seq.ttft_s is None:
                seq.ttft_s = now - seq.group.request.arrival_s
                if seq.group.predicted_s:
                    state.predictor.note_ttft(seq.group.predicted_s, seq.ttft_s)
            if seq.group.request.terms.deadline is not None and seq.misses_first_token:
                events.append(state.end_late(seq, "first_token"))
                return len(token_ids)
        logprobs = result.logprobs and result.logprobs[: len(token_ids)]
        if reason is not None:
            stop_id = token_ids[-1] if reason is FinishReason.STOP else None
            events.append(
                state.end(seq, reason, token_ids=token_ids, logprobs=logprobs, stop_token_id=stop_id)
            )
        else:
            timing = seq.timing(now) if is_first or seq.has_stop_strings else None
            events.append(TokenEvent(seq.request_id, seq.sample_index, token_ids, logprobs, timing=timing))
            state.find_next_event(seq)
        return len(token_ids)

    def _end_prompt(self, seq: Sequence, pooled: tuple[float, ...] | None) -> TokenEvent:
        """End a sequence whose prompt is all there is."""
        if seq.group.request.pooling is None:
            return self._state.end(seq, FinishReason.LENGTH)
        assert pooled is not None, "the prompt's last token gives what is pooled"
        return self._state.end(seq, FinishReason.STOP, pooled=pooled)

    def _share_step(self, record: StepRecord, now: float) -> float:
        """Count a step that ended now as busy time; return the seconds of each of its tokens."""
        state = self._state
        spent_s = state.predictor.spent_s(record.planned_s, now)
        state.counters.busy_s += spent_s
        if not record.num_tokens:  # nothing but copies of blocks
            state.counters.unshared_s += spent_s
            return 0.0
        return spent_s / record.num_tokens


def finish_reason(seq: Sequence, token_id: int) -> FinishReason | None:
    """Tell whether the last token, ``token_id``, ends its sequence."""
    num_tokens = len(seq.token_ids)
    if token_id in seq.stop_ids and num_tokens > seq.min_total:
        return FinishReason.STOP
    return FinishReason.LENGTH if num_tokens >= seq.max_total else None


def _append(seq: Sequence, token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
    """Append tokens up to one that ends the sequence; return them, and the reason of the end if there is one."""
    for count, token_id in enumerate(token_ids, 1):
        seq.token_ids.append(token_id)
        reason = finish_reason(seq, token_id)
        if reason is not None:
            return token_ids[:count], reason
    return token_ids, None


def _scored(seq: Sequence, end: int, entries: tuple[TokenLogprobs, ...]) -> TokenEvent:
    """Return the event of a chunk that ended at token ``end`` and scored prompt tokens."""
    group = seq.group
    last = min(end, seq.num_prompt - 1)  # the last token of the prompt that is predicted by now
    group.num_scored = max(group.num_scored, last)
    start = last + 1 - len(entries)
    return TokenEvent(seq.request_id, seq.sample_index, prompt_logprobs=entries, prompt_start=start)
