"""Speculation: how many drafts a step verifies, how many the worker may propose for the next, what became of them."""

from __future__ import annotations

from typing import Any

from quire.config import MAX_DRAFTS, SchedulerConfig
from quire.scheduler.policies.draft_control import MAX_VAIN, DraftControl
from quire.scheduler.policies.draft_gain import DraftGain
from quire.scheduler.policy import Policy
from quire.scheduler.sequence import Sequence, SequenceState, StepRecord
from quire.scheduler.state import SchedulerState
from quire.scheduler.waiting import StepRoom
from quire.step import SeqPlan, SeqResult, StepResult


class Rule(Policy):
    """The drafts of one scheduler. `DraftControl` says how many pay."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self.control = DraftControl(state.config)
        self.gain = DraftGain()
        self._accepted_at = [0] * MAX_DRAFTS  # drafts accepted, by position

    def budget(self, room: StepRoom) -> None:
        if self.control.any_held and not room.starved:
            self.control.any_held = False
            whole = self._state.policies.whole_spans
            most = room.left if whole is None else whole.left_for_drafts(room)
            room.drafts = self._choose(room.decodes, most)
            room.left -= sum(room.drafts.values())

    def on_step(self, record: StepRecord, result: StepResult, took_s: float) -> None:
        control = self.control
        if record.num_prompt_tokens:
            control.note_mixed_step()
            return
        if record.sequences:
            control.note_step(record.sequences, record.num_drafts, took_s, result.draft_s)
            num_seqs = len(record.sequences)
            num_tokens = (
                sum(len(answer.token_ids) for answer in result.seqs) if record.num_drafts else num_seqs
            )
            drafted = record.num_drafts > 0 or result.draft_s > 0.0
            self.gain.note(num_seqs, num_tokens, took_s, drafted=drafted)
            if control.wakes:
                self._ask_all()

    def configure(self, config: SchedulerConfig) -> None:
        self.control.configure(config)

    def is_idle(self, seq: Sequence) -> bool:
        """Tell whether ``seq`` has no drafts and is not asked for any."""
        return not seq.num_drafts and (seq.num_vain >= MAX_VAIN or not self.control.limit(seq.acceptance))

    def stats(self) -> dict[str, Any]:
        """Return what `EngineStats` has of drafts."""
        most = max(self._state.config.max_num_drafts, self._state.start_config.max_num_drafts)
        return {
            "accepted_at": tuple(self._accepted_at[:most]),
            "num_chosen_drafts": self.control.limit(None),
            "draft_gain": self.control.predicted_gain,
            "measured_draft_gain": self.gain.measured,
        }

    def room(self, seq: Sequence, end: int, num_drafts: int) -> int:
        """Return how many drafts the worker may propose once it has verified ``num_drafts`` behind token ``end``.

        There are blocks for them: a draft model writes K and V there before they are verified. Blocks are taken ahead
        while every running sequence would find one in the next step.
        """
        num_next = min(self.control.ask(seq), max(0, seq.max_planned - end - 1))
        if not num_next:
            return 0
        start, table, cache = end + num_drafts, seq.table, self._state.cache
        if cache.references.num_available > len(self._state.running) * cache.windows.num_groups:
            cache.allocate(table, start + num_next)
        return min(num_next, table.capacity - start)

    def note(self, seq: Sequence, plan: SeqPlan, result: SeqResult) -> None:
        """Count which drafts of ``seq`` were accepted, and how many its worker has for the next step."""
        num_drafts, num_accepted = plan.num_draft_tokens, len(result.token_ids) - 1
        if num_drafts:
            num_tried, counters = result.num_tried or num_drafts, self._state.counters
            seq.acceptance = self.control.note_result(seq.acceptance, num_tried, num_accepted)
            counters.num_verifications += 1
            counters.num_draft_tokens += num_drafts
            counters.num_accepted_tokens += num_accepted
            for position in range(num_accepted):
                self._accepted_at[position] += 1
        if plan.max_next_drafts:
            self.control.note_proposed(result.num_next_drafts)
            seq.num_vain = 0 if result.num_next_drafts else seq.num_vain + 1
            if result.num_next_drafts:
                seq.num_drafted = len(seq.token_ids)
        seq.num_drafts = result.num_next_drafts

    def _choose(self, decodes: list[Sequence], budget: int) -> dict[Sequence, int]:
        """Return how many drafts each decode verifies: as many as its worker holds and free blocks allow.

        All together take at most ``budget`` tokens. No sequence is preempted for a draft.
        """
        chosen: dict[Sequence, int] = {}
        states = self._state.cache.states
        for seq in decodes:
            start, table = seq.num_planned + 1, seq.table
            num_drafts = min(seq.num_drafts, budget, seq.max_planned - start)
            if num_drafts <= 0 or seq.state is not SequenceState.RUNNING:
                continue
            if not self._state.cache.allocate(table, start + num_drafts):
                num_drafts = min(num_drafts, table.capacity - start)
            if states is not None and num_drafts > 0:
                num_drafts = states.drafts.reserve(table, num_drafts)
            if num_drafts > 0:
                chosen[seq] = num_drafts
                budget -= num_drafts
        return chosen

    def _ask_all(self) -> None:
        """Let every running sequence ask for drafts in the next plan, those on the fast path as well."""
        self.control.wakes = False
        for seq in self._state.running:
            seq.next_event_at = 0
