"""What sequences cost: seconds of the engine, and KV blocks times seconds.

    engine_s      The time of a step is shared by its scheduled tokens: prompt tokens, decodes and drafts alike. Steps
                  in flight wait for each other, so no second is counted twice.
    kv_block_s    A sequence is charged for every block of its table while it runs. A block that several sequences
                  share counts for each of them, so that a sequence costs the same whatever runs beside it.

`EngineStats.busy_s` is the ``engine_s`` of all sequences and `EngineStats.unshared_s`: the share of sequences that had
ended while the step was in flight, and whose last event had gone out.

Plain decodes are charged in the loop that applies them (`outcome`), with one addition each. Blocks are counted only
where their number changes.
"""

from __future__ import annotations

from quire.scheduler.sequence import ENDED_EPOCH, Sequence
from quire.scheduler.state import SchedulerState, StepRecord


def share_step(state: SchedulerState, record: StepRecord, now: float) -> float:
    """Count a step that ended now as busy time; return the seconds of each of its tokens."""
    spent_s = state.predictor.spent_s(record.planned_s, now)
    state.counters.busy_s += spent_s
    if not record.num_tokens:  # nothing but copies of blocks
        state.counters.unshared_s += spent_s
        return 0.0
    return spent_s / record.num_tokens


def charge_all(state: SchedulerState, record: StepRecord, token_s: float) -> None:
    """Charge each sequence of a step that failed in part or as a whole, before any of them ends."""
    for seq, plan in zip(record.sequences, record.seqs, strict=True):
        charge(state, seq, token_s * plan.num_scheduled_tokens)


def charge(state: SchedulerState, seq: Sequence, spent_s: float) -> None:
    """Charge one sequence, which may have ended since its step was planned."""
    if seq.epoch == ENDED_EPOCH:
        state.counters.unshared_s += spent_s
    else:
        seq.engine_s += spent_s
