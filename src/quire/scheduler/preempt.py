"""Making room: the last in rank gives way and is computed again later (preemption by recomputation)."""

from __future__ import annotations

from quire.scheduler.sequence import Sequence
from quire.scheduler.state import SchedulerState


def make_room(state: SchedulerState, seq: Sequence, end: int) -> bool:
    """Give ``seq`` blocks up to token ``end``, preempting sequences that rank behind it; False: not in this step.

    Blocks of a victim that is in flight come free when its step is applied, so nobody else is thrown out for what is
    already on its way. The first in rank always gets room at last: it can preempt all others, and it was not admitted
    unless it fits alone.
    """
    cache = state.cache
    while not cache.allocate(seq.table, end):
        num_needed = (-(-end // cache.block_size) - seq.table.num_rows) * cache.windows.num_groups
        if cache.references.num_available + cache.references.num_coming >= num_needed:
            return False
        victim = max(state.running, key=lambda s: s.key)
        if victim is seq:
            return False
        state.preempt(victim)
    return True
