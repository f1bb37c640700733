"""`StepResult` → sequences, blocks and `TokenEvent`s: tokens are appended, ends found, failures withdrawn."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC

from quire.request import FinishReason, TokenEvent
from quire.scheduler.sequence import Sequence, SequenceState
from quire.scheduler.state import Entry, SchedulerState, StepRecord
from quire.step import SeqResult, StepResult

_new_event = (
    tuple.__new__
)  # a named tuple's own __new__ costs twice as much, and there is one per sequence and step


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
    if result.error is not None:
        return _fail_step(state, record, result.error)
    results = _in_order(record, result.seqs)
    failed = [i for i, r in enumerate(results) if r.error is not None]
    distrusted: set[int] = set()
    if failed:
        tables = [record.entries[i][0].table for i in failed]
        distrusted = state.cache.publisher.withdraw(tables, record.step)
    state.cache.references.close_step(record.step)
    events = _apply_sequences(state, record.entries, results, now)
    if failed:
        _restart_readers(state, distrusted)
    return events


def _apply_sequences(
    state: SchedulerState, entries: list[Entry], results: SequenceABC[SeqResult], now: float
) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    counters = state.counters
    publish = state.cache.publisher.publish
    block_size = state.cache.block_size
    num_zombies = 0
    for (seq, epoch, end), result in zip(entries, results, strict=True):
        if seq.epoch != epoch:
            num_zombies += 1
            continue
        if result.error is not None:
            events.append(state.end(seq, FinishReason.ERROR, error=result.error, error_kind="step"))
            continue
        token_ids = result.token_ids
        if token_ids:
            assert len(token_ids) == 1, "drafts are not planned yet"
            token_id = token_ids[0]
            seq.token_ids.append(token_id)
            reason = finish_reason(seq, token_id)
        else:
            reason = None
        table = seq.table
        if (
            end % block_size == 0
            or end <= seq.num_prompt
            or table.num_published * block_size + block_size <= end
        ):
            publish(table, seq.token_ids, end, planned=False)
        if end >= table.slide_at:
            state.cache.slide(table, end)
        if not token_ids:
            continue
        counters.num_generated_tokens += 1
        if seq.ttft_s == 0.0:
            seq.ttft_s = now - seq.group.request.arrival_s
        if reason is not None:
            stop_id = token_id if reason is FinishReason.STOP else None
            events.append(
                state.end(seq, reason, token_ids=token_ids, logprobs=result.logprobs, stop_token_id=stop_id)
            )
            continue
        group = seq.group
        fields = (
            group.request.request_id,
            seq.sample_index,
            token_ids,
            result.logprobs,
            None,
            None,
            None,
            None,
            group.num_cached_tokens,
            seq.num_preemptions,
            group.queued_s,
            seq.ttft_s,
        )
        events.append(_new_event(TokenEvent, fields))
    counters.num_zombie_results += num_zombies
    return events


def _in_order(record: StepRecord, results: SequenceABC[SeqResult]) -> SequenceABC[SeqResult]:
    """Return one result for each entry, in order; what the executor left out is an error of that sequence."""
    entries = record.entries
    if len(results) == len(entries) and all(
        r.seq_id == e[0].seq_id for r, e in zip(results, entries, strict=True)
    ):
        return results
    by_id = {r.seq_id: r for r in results}
    return [
        by_id.get(seq.seq_id) or SeqResult(seq.seq_id, epoch, (), error="the executor returned no result")
        for seq, epoch, _ in entries
    ]


def _fail_step(state: SchedulerState, record: StepRecord, error: str) -> list[TokenEvent]:
    """Every sequence of the step fails; what it published goes, and whoever read that starts again."""
    state.counters.num_failed_steps += 1
    distrusted = state.cache.publisher.withdraw([e[0].table for e in record.entries], record.step)
    state.cache.references.close_step(record.step)
    events = [
        state.end(seq, FinishReason.ERROR, error=error, error_kind="step")
        for seq, epoch, _ in record.entries
        if seq.epoch == epoch
    ]
    _restart_readers(state, distrusted)
    for seq_id in record.gone:  # the worker may not have heard it
        seq = state.sequences.get(seq_id)
        if seq is None or not seq.registered:
            state.gone.append(seq_id)
    return events


def _restart_readers(state: SchedulerState, distrusted: set[int]) -> None:
    for seq in [s for s in state.running if not distrusted.isdisjoint(s.table.reads)]:
        assert seq.state is SequenceState.RUNNING
        state.counters.num_restarted_readers += 1
        state.preempt(seq)
