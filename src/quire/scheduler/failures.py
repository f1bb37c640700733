"""`Failures`: what failed of a step is withdrawn, computed again, or ended; and what ended sequences still cost.

Whatever a failed sequence published in the step is taken back, and those that read it start again.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC

from quire.cache.blocks import Node
from quire.request import FinishReason, TokenEvent
from quire.scheduler.sequence import ENDED_EPOCH, Sequence, SequenceState, StepRecord
from quire.scheduler.state import SchedulerState
from quire.step import SeqResult, TransferDone


class Failures:
    """Applies the failures of one scheduler's steps."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def fail_sequences(
        self, record: StepRecord, results: SequenceABC[SeqResult], token_s: float
    ) -> list[TokenEvent]:
        """Some sequences of a step failed: those that read their blocks start again before their results are read."""
        state = self._state
        self._charge_all(record, token_s)
        failed = [i for i, result in enumerate(results) if result.error is not None]
        distrusted = state.cache.publisher.withdraw([record.sequences[i].table for i in failed], record.step)
        if state.policies.states is not None:
            state.policies.states.distrust(record.sequences[i] for i in failed)
        state.cache.references.close_step(record.step)
        events = []
        for i in failed:
            seq = record.sequences[i]
            if seq.epoch != record.seqs[i].epoch:
                continue
            if results[i].recompute:
                # Its keys and values may be what is not finite.
                state.cache.prefix.withdraw(_path(seq.table.tip))
            whole = state.policies.whole_spans
            is_too_large = (
                results[i].out_of_memory and whole is not None and whole.is_least(seq, record.seqs[i])
            )
            again = results[i].out_of_memory or (results[i].recompute and self._may_recompute(seq))
            if again and not is_too_large:
                state.preempt(seq)
            else:
                kind = "request" if results[i].error_of_request else "step"
                events += self._end_failed(seq, results[i].error, kind)
        self._restart_readers(distrusted)
        return events

    def _may_recompute(self, seq: Sequence) -> bool:
        """Count a fault that may pass, as NaN logits from bad memory; at each token of a sequence one is forgiven."""
        again = seq.recomputed_at != len(seq.token_ids)
        seq.recomputed_at = len(seq.token_ids)
        self._state.counters.num_recomputed += again
        self._state.counters.num_recompute_failed += not again
        return again

    def fail_step(self, record: StepRecord, error: str, token_s: float) -> list[TokenEvent]:
        """Every sequence of the step fails; what it published is withdrawn, and sequences that read it start again."""
        state = self._state
        self._charge_all(record, token_s)
        state.counters.num_failed_steps += 1
        distrusted = state.cache.publisher.withdraw([seq.table for seq in record.sequences], record.step)
        if state.policies.states is not None:
            state.policies.states.fail(record)
        state.cache.references.close_step(record.step)
        events = []
        for seq, plan in zip(record.sequences, record.seqs, strict=True):
            if seq.epoch == plan.epoch:
                events += self._end_failed(seq, error)
        self._restart_readers(distrusted)
        if record.adapter_moves:
            state.policies.adapters.slots.repeat(record.adapter_moves)
        for seq_id in record.gone:  # the worker may not have been told
            alive = state.sequences.get(seq_id)
            if alive is None or not alive.registered:
                state.gone.append(seq_id)
        if record.transfers:
            state.policies.transfers.end([TransferDone(t.transfer_id, 0, error) for t in record.transfers])
        return events

    def _end_failed(self, seq: Sequence, error: str | None, kind: str = "step") -> list[TokenEvent]:
        """End a sequence that a step failed; a failed beam takes its request along."""
        if seq.group.beams is not None:
            return self._state.end_all(seq.group, FinishReason.ERROR, error=error, error_kind=kind)
        return [self._state.end(seq, FinishReason.ERROR, error=error, error_kind=kind)]

    def _restart_readers(self, distrusted: set[int]) -> None:
        for seq in [s for s in self._state.running if not distrusted.isdisjoint(s.table.reads)]:
            assert seq.state is SequenceState.RUNNING
            self._state.counters.num_restarted_readers += 1
            if self._state.policies.states is not None:
                self._state.policies.states.distrust((seq,))
            self._state.preempt(seq)

    def _charge_all(self, record: StepRecord, token_s: float) -> None:
        """Charge each sequence of a step that failed in part or as a whole, before any of them ends."""
        for seq, plan in zip(record.sequences, record.seqs, strict=True):
            self.charge(seq, token_s * plan.num_scheduled_tokens)

    def charge(self, seq: Sequence, spent_s: float) -> None:
        """Charge a sequence that may have ended since its step was planned."""
        if seq.epoch == ENDED_EPOCH:
            self._state.counters.unshared_s += spent_s
        else:
            seq.engine_s += spent_s


def in_order(record: StepRecord, results: SequenceABC[SeqResult]) -> tuple[SeqResult, ...]:
    """Return one result for each entry, in order; what the executor left out is an error of that sequence."""
    by_id = {r.seq_id: r for r in results}
    return tuple(
        by_id.get(p.seq_id) or SeqResult(p.seq_id, p.epoch, (), error="the executor returned no result")
        for p in record.seqs
    )


def _path(node: Node | None) -> list[Node]:
    """Return ``node`` and all above it in the prefix tree."""
    path = []
    while node is not None:
        path.append(node)
        node = node.parent
    return path
