"""How many drafts a step verifies, and how many the worker may propose for the next."""

from __future__ import annotations

from collections.abc import Iterable

from quire.scheduler.sequence import Sequence, SequenceState
from quire.scheduler.state import SchedulerState


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


def room_for_drafts(state: SchedulerState, seq: Sequence, end: int, num_drafts: int) -> int:
    """Return how many drafts the worker may propose once it has verified ``num_drafts`` behind token ``end``.

    There are blocks for them: a draft model writes K and V there before they are verified. Blocks are taken ahead while
    every running sequence would find one in the next step.
    """
    num_next = min(state.config.max_num_drafts, max(0, seq.max_planned - end - 1))
    start, table, cache = end + num_drafts, seq.table, state.cache
    if cache.references.num_available > len(state.running) * cache.windows.num_groups:
        cache.allocate(table, start + num_next)
    return min(num_next, table.capacity - start)
