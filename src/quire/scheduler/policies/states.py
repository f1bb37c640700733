"""Recurrent states: each sequence that runs has a slot, and checkpoints are saved as its tokens are computed.

`quire.cache.states` keeps the books; the cache asks it at each admission, fork and release. Here plans are completed
with what the worker has to know: the slot of a new sequence, and where a chunk writes checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from quire.cache.states import StateSlots
from quire.scheduler.policy import Policy
from quire.scheduler.sequence import Sequence, StepRecord
from quire.scheduler.state import SchedulerState
from quire.step import NewSeq, SeqPlan, StepResult


class Rule(Policy):
    """The states of one scheduler."""

    def __init__(self, state: SchedulerState) -> None:
        cache = state.cache
        assert not state.config.max_num_drafts or cache.config.num_draft_states, (
            "drafts need slots for states"
        )
        self._state = state
        self.slots = StateSlots(cache.config, cache.prefix, cache.references, cache.block_size)
        cache.states = self.slots
        self._has_drafts = len(self.slots.drafts) > 0

    def complete(self, sequences: list[Sequence], plans: list[SeqPlan], new_seqs: list[NewSeq]) -> None:
        """Add to the plans of a step, and to its new sequences, what concerns their states."""
        slots = self.slots
        for index, new in enumerate(new_seqs):
            table = self._state.sequences[new.seq_id].table
            new_seqs[index] = replace(new, state_slot=slots.live[table].slot)
        for index, (seq, plan) in enumerate(zip(sequences, plans, strict=True)):
            start = plan.num_computed_tokens
            end = start + plan.num_scheduled_tokens
            checkpoints = slots.plan_saves(
                seq.table, start, end, plan.num_draft_tokens, rolls=not seq.is_beam
            )
            if self._has_drafts:
                draft_saves = slots.plan_drafts(seq.table, plan.num_known_tokens, plan.num_draft_tokens)
                checkpoints = tuple(sorted((*checkpoints, *draft_saves)))
            if checkpoints:
                plans[index] = plan._replace(checkpoints=checkpoints)
        slots.drafts.planned()

    def on_step(self, record: StepRecord, result: StepResult, took_s: float) -> None:
        self.slots.close(record.step)
        if record.num_drafts:
            rows = zip(record.sequences, record.seqs, result.seqs, strict=True)
            num_accepted = {
                seq.table: max(0, len(answer.token_ids) - 1)
                for seq, plan, answer in rows
                if seq.epoch == plan.epoch and seq.table in self.slots.live
            }
            self.slots.drafts.close(record.step, num_accepted)

    def distrust(self, sequences: Iterable[Sequence]) -> None:
        """These sequences failed, or read what one that failed wrote."""
        self.slots.distrust(seq.table for seq in sequences)

    def fail(self, record: StepRecord) -> None:
        """A whole step failed, and its sequences end."""
        self.distrust(record.sequences)
        self.slots.fail(record.step)

    def stats(self) -> dict[str, int]:
        """Return the gauges and counters of `EngineStats` that are about states."""
        slots = self.slots
        slots.sweep()
        return {
            "num_state_slots": slots.num_slots + len(slots.drafts),
            "num_live_states": len(slots.live),
            "num_checkpoints": len(slots.checkpoints),
            "state_slot_bytes": slots.config.state_bytes,
            "num_checkpoint_loads": slots.num_loads,
            "num_checkpoint_saves": slots.num_saves,
            "num_evicted_checkpoints": slots.num_evicted,
        }
