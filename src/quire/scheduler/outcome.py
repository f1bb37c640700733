"""`StepResult` → sequences, blocks and `TokenEvent`s: tokens are appended, ends found, failures withdrawn."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from operator import itemgetter

from quire.request import FinishReason, TokenEvent, TokenLogprobs
from quire.scheduler.beam_steps import end_all, take_continuations
from quire.scheduler.deadline import end_late, is_late
from quire.scheduler.policy import shrink_budget
from quire.scheduler.sequence import Sequence, SequenceState
from quire.scheduler.state import Entry, SchedulerState, StepRecord
from quire.step import SeqResult, StepResult

_new_event = tuple.__new__  # half the cost of the named tuple's own, once per sequence and step
_seq_id_of = itemgetter(0)  # of a SeqResult and of a SeqPlan
_error_of = itemgetter(SeqResult._fields.index("error"))


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
    if result.max_tokens is not None:
        shrink_budget(state, result.max_tokens)
    if result.error is not None:
        return _fail_step(state, record, result.error)
    results = result.seqs
    if [*map(_seq_id_of, results)] != [*map(_seq_id_of, record.seqs)]:
        results = _in_order(record, results)
    num_finished = state.counters.num_finished
    events: list[TokenEvent] = []
    if [*map(_error_of, results)].count(None) < len(results):
        failed = [i for i, r in enumerate(results) if r.error is not None]
        events = _fail_sequences(state, record, results, failed)
    else:
        state.cache.references.close_step(record.step)
    _apply_sequences(state, record.entries, results, now, events)
    state.pace.note(
        record.planned_s,
        now,
        num_prompt_rows=record.num_prompt_rows,
        num_ends=state.counters.num_finished - num_finished,
        waiting=len(state.waiting) > 0,
    )
    return events


def _apply_sequences(
    state: SchedulerState,
    entries: list[Entry],
    results: SequenceABC[SeqResult],
    now: float,
    events: list[TokenEvent],
) -> None:
    """Append tokens, settle blocks, find ends: the other hot loop beside `Planner._emit_decodes`."""
    add_event = events.append
    num_zombies = num_undrawn = 0
    for (seq, epoch, end), result in zip(entries, results, strict=True):
        if seq.epoch != epoch:  # a zombie: it ended or was preempted while this step was in flight
            num_zombies += 1
            continue
        if end < seq.quiet_until:
            if result is seq.last_result:  # as in the step before (the simulator's are): so is its event
                seq.token_ids.append(result[2][0])
                add_event(seq.last_event)
                continue
            token_ids = result[2]
            if len(token_ids) == 1 and token_ids[0] not in seq.stop_ids and not result[5]:
                seq.token_ids.append(token_ids[0])
                head = (seq.request_id, seq.sample_index, token_ids, result[4])
                event = _new_event(TokenEvent, head + seq.event_tail)
                seq.last_result, seq.last_event = result, event
                add_event(event)
                continue
        num_undrawn += not _apply_one(state, seq, end, result, now, events)
    state.counters.num_zombie_results += num_zombies
    state.counters.num_generated_tokens += len(entries) - num_zombies - num_undrawn


def _apply_one(
    state: SchedulerState, seq: Sequence, end: int, result: SeqResult, now: float, events: list[TokenEvent]
) -> bool:
    """Apply one result, whatever there is to do; tell whether it is a token that counts as generated now."""
    token_ids = result.token_ids
    if result.prompt_logprobs:
        events.append(_scored(seq, end, result.prompt_logprobs))
    known = seq.token_ids
    if token_ids:
        (token_id,) = token_ids  # drafts are not planned yet
        if not seq.is_beam:  # else it is not known yet what comes next
            known.append(token_id)
    if end >= seq.table.due_at:
        state.cache.settle(seq.table, known, end)
    if not token_ids:
        seq.num_steps += 1
        seq.num_chunks += 1
        if seq.prompt_only and end == seq.row_limit:
            events.append(_end_prompt(state, seq, result.pooled))
        return False
    logprobs = result.logprobs
    if seq.is_beam:
        events += take_continuations(state, seq, end, logprobs, now)
        return False  # what it draws is counted when it is answered
    tail = seq.event_tail
    if not tail:
        tail = _new_tail(seq, now)
        if is_late(seq):
            events.append(end_late(state, seq, "first_token"))
            return True
    if end >= seq.row_limit or token_id in seq.stop_ids:
        reason = finish_reason(seq, token_id)
        if reason is not None:
            stop_id = token_id if reason is FinishReason.STOP else None
            events.append(
                state.end(seq, reason, token_ids=token_ids, logprobs=logprobs, stop_token_id=stop_id)
            )
            return True
    seq.find_quiet()
    events.append(_new_event(TokenEvent, (seq.request_id, seq.sample_index, token_ids, logprobs, *tail)))
    return True


def _end_prompt(state: SchedulerState, seq: Sequence, pooled: tuple[float, ...] | None) -> TokenEvent:
    """End a sequence whose prompt is all there is."""
    if seq.group.request.pooling is None:
        return state.end(seq, FinishReason.LENGTH)
    assert pooled is not None, "the prompt's last row gives what is pooled"
    return state.end(seq, FinishReason.STOP, pooled=pooled)


def _scored(seq: Sequence, end: int, entries: tuple[TokenLogprobs, ...]) -> TokenEvent:
    """Return the event of a chunk that ended at row ``end`` and scored the prompt's tokens on its way."""
    group = seq.group
    last = min(end, seq.num_prompt - 1)  # the last token of the prompt that is predicted by now
    group.num_scored = max(group.num_scored, last)
    start = last + 1 - len(entries)
    return TokenEvent(seq.request_id, seq.sample_index, prompt_logprobs=entries, prompt_start=start)


def _new_tail(seq: Sequence, now: float) -> tuple[object, ...]:
    """Return the fields of a `TokenEvent` that stay the same until the sequence is preempted or ends."""
    group = seq.group
    seq.num_chunks += 1
    seq.num_steps += 1
    seq.num_tokens_then = len(seq.token_ids)
    if seq.ttft_s is None:
        seq.ttft_s = now - group.request.arrival_s
    seq.event_tail = (
        None,
        None,
        None,
        None,
        group.num_cached_tokens,
        seq.num_preemptions,
        group.queued_s,
        seq.ttft_s,
        None,
        0,
        None,
        seq.num_steps,
        seq.num_chunks,
        group.cache_miss,
        0.0,
    )
    return seq.event_tail


def _in_order(record: StepRecord, results: SequenceABC[SeqResult]) -> tuple[SeqResult, ...]:
    """Return one result for each entry, in order; what the executor left out is an error of that sequence."""
    by_id = {r.seq_id: r for r in results}
    return tuple(
        by_id.get(seq.seq_id) or SeqResult(seq.seq_id, epoch, (), error="the executor returned no result")
        for seq, epoch, _ in record.entries
    )


def _fail_sequences(
    state: SchedulerState, record: StepRecord, results: SequenceABC[SeqResult], failed: list[int]
) -> list[TokenEvent]:
    """Some sequences of a step failed: whoever read their blocks starts again before its own result is looked at."""
    distrusted = state.cache.publisher.withdraw([record.entries[i][0].table for i in failed], record.step)
    state.cache.references.close_step(record.step)
    events = []
    for i in failed:
        seq, epoch, _ = record.entries[i]
        if seq.epoch == epoch and results[i].out_of_memory:
            state.preempt(seq)
        elif seq.epoch == epoch:
            events += _end_failed(state, seq, results[i].error)
    _restart_readers(state, distrusted)
    return events


def _fail_step(state: SchedulerState, record: StepRecord, error: str) -> list[TokenEvent]:
    """Every sequence of the step fails; what it published goes, and whoever read that starts again."""
    state.counters.num_failed_steps += 1
    distrusted = state.cache.publisher.withdraw([e[0].table for e in record.entries], record.step)
    state.cache.references.close_step(record.step)
    events = []
    for failed, epoch, _ in record.entries:
        if failed.epoch == epoch:
            events += _end_failed(state, failed, error)
    _restart_readers(state, distrusted)
    state.adapters.repeat(record.adapter_moves)
    for seq_id in record.gone:  # the worker may not have heard it
        seq = state.sequences.get(seq_id)
        if seq is None or not seq.registered:
            state.gone.append(seq_id)
    return events


def _end_failed(state: SchedulerState, seq: Sequence, error: str | None) -> list[TokenEvent]:
    """End a sequence that a step failed; a failed beam takes its request along."""
    if seq.group.beams is not None:
        return end_all(state, seq.group, FinishReason.ERROR, error=error, error_kind="step")
    return [state.end(seq, FinishReason.ERROR, error=error, error_kind="step")]


def _restart_readers(state: SchedulerState, distrusted: set[int]) -> None:
    for seq in [s for s in state.running if not distrusted.isdisjoint(s.table.reads)]:
        assert seq.state is SequenceState.RUNNING
        state.counters.num_restarted_readers += 1
        state.preempt(seq)
