"""n > 1: sequence 0 computes the prompt but for its last token, then its siblings are forked from it (DESIGN §4)."""

from __future__ import annotations

from quire.scheduler.sequence import Sequence
from quire.scheduler.state import SchedulerState


def fork_siblings(state: SchedulerState, leader: Sequence) -> None:
    """Fork every sibling of a running ``leader`` that is about to compute its last prompt token.

    Full blocks are shared, a partial tail is copied by a move, and each computes the last prompt token itself. A
    sibling that finds no seat or no block waits like anybody else; most of its prompt is in the prefix tree by then.
    """
    num_shared = leader.num_prompt - 1
    assert leader.num_planned == num_shared
    siblings, leader.siblings = leader.siblings, []
    for sibling in siblings:
        has_seat = len(state.running) < state.config.max_num_seqs
        if has_seat and state.cache.fork(leader.table, sibling.table, num_shared):
            state.start(sibling, num_shared)
            state.counters.num_forks += 1
        else:
            state.gate.return_seat()
            state.enqueue(sibling)
