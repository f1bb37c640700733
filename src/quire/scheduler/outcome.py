"""`StepResult` → sequences, blocks and `TokenEvent`s: tokens are appended, ends found, failures withdrawn."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from operator import attrgetter

from quire.cache.block_table import Node
from quire.request import FinishReason, TokenEvent, TokenLogprobs
from quire.scheduler.beam_steps import end_all, take_continuations
from quire.scheduler.costs import charge, charge_all, share_step
from quire.scheduler.deadline import end_late, is_late
from quire.scheduler.drafts import ask_all, note_drafts
from quire.scheduler.sequence import Sequence, SequenceState
from quire.scheduler.slo import shrink_budget
from quire.scheduler.state import SchedulerState, StepRecord
from quire.scheduler.transfers import Transfers
from quire.step import SeqPlan, SeqResult, StepResult, TransferDone

_seq_id = attrgetter("seq_id")
_error = attrgetter("error")


def finish_reason(seq: Sequence, token_id: int) -> FinishReason | None:
    """Tell whether the last token, ``token_id``, ends its sequence."""
    num_tokens = len(seq.token_ids)
    if token_id in seq.stop_ids and num_tokens > seq.min_total:
        return FinishReason.STOP
    return FinishReason.LENGTH if num_tokens >= seq.max_total else None


def apply_result(state: SchedulerState, result: StepResult, now: float) -> list[TokenEvent]:
    """Apply the result of the oldest step in flight."""
    record = state.in_flight.popleft()
    assert record.step == result.step, "results come in order of submission"
    state.now = now
    token_s = share_step(state, record, now)
    if result.max_tokens is not None:
        shrink_budget(state, result.max_tokens)
    if result.error is not None:
        state.predictor.note_failure(now)
        charge_all(state, record, token_s)
        return _fail_step(state, record, result.error)
    results = result.seqs
    if [*map(_seq_id, results)] != [*map(_seq_id, record.seqs)]:
        results = _in_order(record, results)
    events: list[TokenEvent] = []
    if [*map(_error, results)].count(None) < len(results):
        charge_all(state, record, token_s)
        token_s = 0.0
        failed = [i for i, result in enumerate(results) if result.error is not None]
        events = _fail_sequences(state, record, results, failed)
    else:
        state.cache.references.close_step(record.step)
    if result.transfers_done:
        Transfers(state).end(result.transfers_done)
    _apply_sequences(state, record, results, now, token_s, events)
    took_s = state.predictor.note(
        record.seqs,
        record.planned_s,
        now,
        num_prompt_tokens=record.num_prompt_tokens,
    )
    control = state.draft_control
    if control is not None and record.num_prompt_tokens:
        control.note_mixed_step()
    elif control is not None and record.sequences:
        control.note_step(record.sequences, record.num_drafts, took_s, result.draft_s)
        num_tokens = sum(len(each.token_ids) for each in results) if record.num_drafts else len(results)
        drafted = record.num_drafts > 0 or result.draft_s > 0.0
        state.draft_gain.note(len(results), num_tokens, took_s, drafted=drafted)
        if control.wakes:
            ask_all(state, control)
    return events


def _apply_sequences(
    state: SchedulerState,
    record: StepRecord,
    results: SequenceABC[SeqResult],
    now: float,
    token_s: float,
    events: list[TokenEvent],
) -> None:
    """Append tokens, settle blocks, find ends: the other hot loop beside `Planner._emit_decodes`."""
    add_event = events.append
    num_zombies = num_events = num_generated = 0
    for seq, plan, result in zip(record.sequences, record.seqs, results, strict=True):
        if seq.epoch != plan.epoch:  # a zombie: it ended or was preempted while this step was in flight
            num_zombies += 1
            charge(state, seq, token_s * plan.num_scheduled_tokens)
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
            num_generated += _apply_one(state, seq, plan, result, now, events)
    state.counters.num_zombie_results += num_zombies
    num_plain = len(record.sequences) - num_zombies - num_events
    state.counters.num_generated_tokens += num_plain + num_generated


def _apply_one(
    state: SchedulerState,
    seq: Sequence,
    plan: SeqPlan,
    result: SeqResult,
    now: float,
    events: list[TokenEvent],
) -> int:
    """Apply one result, whatever there is to do; return how many of its tokens count as generated now."""
    end = plan.num_computed_tokens + plan.num_scheduled_tokens
    if result.prompt_logprobs:
        events.append(_scored(seq, end, result.prompt_logprobs))
    if seq.is_beam and result.token_ids:
        state.cache.settle(seq.table, seq.token_ids, end)  # the next token is not known yet
        events += take_continuations(state, seq, end, result.logprobs, now)
        return 0  # tokens of beams are counted when the search is answered
    if result.token_ids and state.draft_control is not None:
        note_drafts(state, state.draft_control, seq, plan, result)
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
            events.append(_end_prompt(state, seq, result.pooled))
        return 0
    is_first, seq.told_first = not seq.told_first, True
    if is_first:
        seq.num_chunks += 1
        if seq.ttft_s is None:
            seq.ttft_s = now - seq.group.request.arrival_s
            state.predictor.note_ttft(seq.group.predicted_s, seq.ttft_s)
        if is_late(seq):
            events.append(end_late(state, seq, "first_token"))
            return len(token_ids)
    logprobs = result.logprobs and result.logprobs[: len(token_ids)]
    if reason is not None:
        stop_id = token_ids[-1] if reason is FinishReason.STOP else None
        events.append(state.end(seq, reason, token_ids=token_ids, logprobs=logprobs, stop_token_id=stop_id))
    else:
        timing = seq.timing(now) if is_first or seq.has_stop_strings else None
        events.append(TokenEvent(seq.request_id, seq.sample_index, token_ids, logprobs, timing=timing))
    if reason is None:
        state.find_next_event(seq)
    return len(token_ids)


def _append(seq: Sequence, token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
    """Append tokens up to one that ends the sequence; return them, and the reason of the end if there is one."""
    for count, token_id in enumerate(token_ids, 1):
        seq.token_ids.append(token_id)
        reason = finish_reason(seq, token_id)
        if reason is not None:
            return token_ids[:count], reason
    return token_ids, None


def _end_prompt(state: SchedulerState, seq: Sequence, pooled: tuple[float, ...] | None) -> TokenEvent:
    """End a sequence whose prompt is all there is."""
    if seq.group.request.pooling is None:
        return state.end(seq, FinishReason.LENGTH)
    assert pooled is not None, "the prompt's last token gives what is pooled"
    return state.end(seq, FinishReason.STOP, pooled=pooled)


def _scored(seq: Sequence, end: int, entries: tuple[TokenLogprobs, ...]) -> TokenEvent:
    """Return the event of a chunk that ended at token ``end`` and scored prompt tokens."""
    group = seq.group
    last = min(end, seq.num_prompt - 1)  # the last token of the prompt that is predicted by now
    group.num_scored = max(group.num_scored, last)
    start = last + 1 - len(entries)
    return TokenEvent(seq.request_id, seq.sample_index, prompt_logprobs=entries, prompt_start=start)


def _in_order(record: StepRecord, results: SequenceABC[SeqResult]) -> tuple[SeqResult, ...]:
    """Return one result for each entry, in order; what the executor left out is an error of that sequence."""
    by_id = {r.seq_id: r for r in results}
    return tuple(
        by_id.get(p.seq_id) or SeqResult(p.seq_id, p.epoch, (), error="the executor returned no result")
        for p in record.seqs
    )


def _fail_sequences(
    state: SchedulerState, record: StepRecord, results: SequenceABC[SeqResult], failed: list[int]
) -> list[TokenEvent]:
    """Some sequences of a step failed: those that read their blocks start again before their results are looked at."""
    distrusted = state.cache.publisher.withdraw([record.sequences[i].table for i in failed], record.step)
    state.cache.references.close_step(record.step)
    events = []
    for i in failed:
        seq = record.sequences[i]
        if seq.epoch != record.seqs[i].epoch:
            continue
        if results[i].recompute:
            state.cache.prefix.withdraw(_path(seq.table.tip))  # its keys and values may be what is not finite
        if results[i].out_of_memory or (results[i].recompute and _may_recompute(state, seq)):
            state.preempt(seq)
        else:
            kind = "request" if results[i].error_of_request else "step"
            events += _end_failed(state, seq, results[i].error, kind)
    _restart_readers(state, distrusted)
    return events


def _path(node: Node | None) -> list[Node]:
    """Return ``node`` and all above it in the prefix tree."""
    path = []
    while node is not None:
        path.append(node)
        node = node.parent
    return path


def _may_recompute(state: SchedulerState, seq: Sequence) -> bool:
    """Count a fault that may pass, as NaN logits from bad memory; at each token of a sequence one is forgiven."""
    again = seq.recomputed_at != len(seq.token_ids)
    seq.recomputed_at = len(seq.token_ids)
    state.counters.num_recomputed += again
    state.counters.num_recompute_failed += not again
    return again


def _fail_step(state: SchedulerState, record: StepRecord, error: str) -> list[TokenEvent]:
    """Every sequence of the step fails; what it published is withdrawn, and sequences that read it start again."""
    state.counters.num_failed_steps += 1
    distrusted = state.cache.publisher.withdraw([seq.table for seq in record.sequences], record.step)
    state.cache.references.close_step(record.step)
    events = []
    for seq, plan in zip(record.sequences, record.seqs, strict=True):
        if seq.epoch == plan.epoch:
            events += _end_failed(state, seq, error)
    _restart_readers(state, distrusted)
    state.adapters.repeat(record.adapter_moves)
    for seq_id in record.gone:  # the worker may not have been told
        alive = state.sequences.get(seq_id)
        if alive is None or not alive.registered:
            state.gone.append(seq_id)
    Transfers(state).end([TransferDone(t.transfer_id, 0, error) for t in record.transfers])
    return events


def _end_failed(
    state: SchedulerState, seq: Sequence, error: str | None, kind: str = "step"
) -> list[TokenEvent]:
    """End a sequence that a step failed; a failed beam takes its request along."""
    if seq.group.beams is not None:
        return end_all(state, seq.group, FinishReason.ERROR, error=error, error_kind=kind)
    return [state.end(seq, FinishReason.ERROR, error=error, error_kind=kind)]


def _restart_readers(state: SchedulerState, distrusted: set[int]) -> None:
    for seq in [s for s in state.running if not distrusted.isdisjoint(s.table.reads)]:
        assert seq.state is SequenceState.RUNNING
        state.counters.num_restarted_readers += 1
        state.preempt(seq)
