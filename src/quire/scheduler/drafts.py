"""How many drafts a step verifies, how many the worker may propose for the next, and what became of them."""

from __future__ import annotations

from collections.abc import Iterable

from quire.scheduler.draft_control import DraftControl
from quire.scheduler.sequence import Sequence, SequenceState
from quire.scheduler.state import SchedulerState
from quire.step import SeqPlan, SeqResult


def ask_all(state: SchedulerState, control: DraftControl) -> None:
    """Let every running sequence ask for drafts in the next plan, those on the fast path as well."""
    control.wakes = False
    for seq in state.running:
        seq.next_event_at = 0


def choose_drafts(state: SchedulerState, decodes: Iterable[Sequence], budget: int) -> dict[Sequence, int]:
    """Return how many drafts each decode verifies: as many as its worker holds and free blocks allow.

    All together take at most ``budget`` tokens. No sequence is preempted for a draft.
    """
    chosen: dict[Sequence, int] = {}
    for seq in decodes:
        start, table = seq.num_planned + 1, seq.table
        num_drafts = min(seq.num_drafts, budget, seq.max_planned - start)
        if num_drafts <= 0 or seq.state is not SequenceState.RUNNING:
            continue
        if not state.cache.allocate(table, start + num_drafts):
            num_drafts = min(num_drafts, table.capacity - start)
        if num_drafts > 0:
            chosen[seq] = num_drafts
            budget -= num_drafts
    return chosen


def room_for_drafts(
    state: SchedulerState, control: DraftControl, seq: Sequence, end: int, num_drafts: int
) -> int:
    """Return how many drafts the worker may propose once it has verified ``num_drafts`` behind token ``end``.

    There are blocks for them: a draft model writes K and V there before they are verified. Blocks are taken ahead while
    every running sequence would find one in the next step.
    """
    num_next = min(control.ask(seq), max(0, seq.max_planned - end - 1))
    if not num_next:
        return 0
    start, table, cache = end + num_drafts, seq.table, state.cache
    if cache.references.num_available > len(state.running) * cache.windows.num_groups:
        cache.allocate(table, start + num_next)
    return min(num_next, table.capacity - start)


def note_drafts(
    state: SchedulerState, control: DraftControl, seq: Sequence, plan: SeqPlan, result: SeqResult
) -> None:
    """Count which drafts of ``seq`` were accepted, and how many its worker has for the next step."""
    num_drafts, num_accepted = plan.num_draft_tokens, len(result.token_ids) - 1
    if num_drafts:
        seq.acceptance = control.note_result(seq.acceptance, result.num_tried or num_drafts, num_accepted)
        state.counters.num_verifications += 1
        state.counters.num_draft_tokens += num_drafts
        state.counters.num_accepted_tokens += num_accepted
        for place in range(num_accepted):
            state.accepted_at[place] += 1
    if plan.max_next_drafts:
        control.note_proposed(result.num_next_drafts)
        seq.num_vain = 0 if result.num_next_drafts else seq.num_vain + 1
        if result.num_next_drafts:
            seq.num_drafted = len(seq.token_ids)
    seq.num_drafts = result.num_next_drafts
