"""Beams as sequences: each is one of the request's ``width`` `Sequence`s, which live on, fork, or lie parked.

A beam that has given its continuations waits for the others of its depth; nothing of it is planned (its ``max_planned``
is the number of its known tokens). The last of them to come selects:

    before      A: t t a   B: t t b   C: t t c          best continuations: a x, a y, c z
    after       A: t t a x            (goes on in its place; x overrides what the worker sampled: ``forced_token_ids``)
                C: t t c z            (the same)
                B: t t a y            (parked, its blocks free; forked from A at the next plan, as in `fork`)

A fork that finds no seat or no block waits like any other sequence and computes its tokens again, mostly from the
prefix tree.
"""

from __future__ import annotations

from quire.request import FinishReason, TokenEvent, TokenLogprobs
from quire.scheduler.beam import BeamSearch, Child, Path
from quire.scheduler.sequence import RequestState, Sequence, SequenceState
from quire.scheduler.state import SchedulerState


def start_search(state: SchedulerState, group: RequestState) -> None:
    """Queue the first of a request's sequences; the others lie parked until it has given its continuations."""
    leader, *others = group.sequences
    sampling = group.request.sampling
    max_outputs = leader.max_total - leader.num_prompt
    group.beams = BeamSearch(sampling, leader.stop_ids, max_outputs)
    group.beams.paths[leader] = Path()
    for seq in others:
        seq.state = SequenceState.PARKED
    state.enqueue(leader)


def take_continuations(
    state: SchedulerState, seq: Sequence, end: int, logprobs: tuple[TokenLogprobs, ...] | None, now: float
) -> list[TokenEvent]:
    """A step computed ``seq`` up to token ``end`` and sampled: note what it found; the last of its depth selects."""
    group = seq.group
    beams = group.beams
    assert beams is not None
    assert logprobs is not None
    if end != len(seq.token_ids) or seq not in beams.paths:  # of a depth that is over
        return []
    seq.num_steps += 1
    seq.num_chunks += end == seq.num_prompt
    beams.found[seq] = logprobs[0]
    if not beams.is_complete:
        return []
    children = beams.select()
    if not children:
        return _deliver(state, group, now)
    _replace_beams(state, group, children)
    return []


def end_all(
    state: SchedulerState,
    group: RequestState,
    reason: FinishReason,
    *,
    error: str | None = None,
    error_kind: str | None = None,
) -> list[TokenEvent]:
    """End every sequence of a request; one terminal event for each answer that its client waits for."""
    # Last first, so that siblings go before the leader that they are attached to.
    events = [
        state.end(seq, reason, error=error, error_kind=error_kind) for seq in reversed(tuple(group.sequences))
    ]
    return [event for event in events if event.sample_index < group.request.sampling.num_samples]


def fork_beams(state: SchedulerState) -> None:
    """Fork what was selected since the last plan."""
    forks, state.forks = state.forks, []
    for parent, child in forks:
        if child.state is not SequenceState.PARKED:
            continue  # its request has ended
        num_shared = len(child.token_ids) - 1
        computed = parent.state is SequenceState.RUNNING and parent.num_planned == num_shared
        has_seat = len(state.running) < state.config.max_num_seqs
        if computed and has_seat and state.cache.fork(parent.table, child.table, num_shared):
            state.start(child, num_shared)
            state.counters.num_forks += 1
        else:
            state.gate.return_seat()
            state.enqueue(child)


def park_idle(state: SchedulerState) -> bool:
    """Take the seats and blocks of beams that wait for others of their depth; False where there are none.

    For when nothing else can go on: what they found is kept, and they compute their last tokens again when selected.
    """
    idle = [seq for seq in state.running if seq.group.beams is not None and seq in seq.group.beams.found]
    for seq in idle:
        state.preempt(seq)
    return bool(idle)


def _replace_beams(state: SchedulerState, group: RequestState, children: list[Child[Sequence]]) -> None:
    beams = group.beams
    assert beams is not None
    firsts = {child.parent: child for child in reversed(children)}  # which goes on in its parent's place
    for seq in beams.paths:
        if seq not in firsts:
            state.park(seq)
    parked = iter([seq for seq in group.sequences if seq not in firsts])
    places: list[tuple[Child[Sequence], Sequence]] = []
    for child in children:
        first = firsts[child.parent] is child
        places.append((child, child.parent if first else next(parked)))
    for child, seq in places:
        if seq is not child.parent:
            _become_fork(seq, child)
            state.forks.append((child.parent, seq))
    for child, seq in places:
        if seq is child.parent:
            _go_on(state, seq, child.path.logprobs[-1].token_id)
    beams.paths = {seq: child.path for child, seq in places}


def _become_fork(seq: Sequence, child: Child[Sequence]) -> None:
    """Take over the parent's tokens and one more. The parent's own next token is not there yet."""
    seq.token_ids = [*child.parent.token_ids, child.path.logprobs[-1].token_id]
    seq.num_planned = 0
    seq.num_steps, seq.num_chunks = child.parent.num_steps, child.parent.num_chunks
    seq.epoch += 1
    seq.table.chain = []


def _go_on(state: SchedulerState, seq: Sequence, token_id: int) -> None:
    """Add the selected token to a beam that keeps its place; it runs, with all its tokens computed, or was parked."""
    num_known = len(seq.token_ids)
    seq.token_ids.append(token_id)
    if seq.state is SequenceState.PARKED:
        state.enqueue(seq)
        return
    assert seq.state is SequenceState.RUNNING
    assert seq.num_planned == num_known
    seq.forced = (token_id,)  # its worker has sampled another one


def _deliver(state: SchedulerState, group: RequestState, now: float) -> list[TokenEvent]:
    """The search is over: the best hypotheses are the answers."""
    beams, sampling = group.beams, group.request.sampling
    assert beams is not None
    if len(beams.finished) < sampling.num_samples:
        text = f"beam search found {len(beams.finished)} of {sampling.num_samples} answers: too small a vocabulary."
        return end_all(state, group, FinishReason.ERROR, error=text, error_kind="step")
    events = []
    num_steps = max(seq.num_steps for seq in group.sequences)
    num_chunks = max(seq.num_chunks for seq in group.sequences)
    for seq in reversed(tuple(group.sequences)):
        seq.ttft_s, seq.num_steps, seq.num_chunks = now - group.request.arrival_s, num_steps, num_chunks
        path = beams.finished[min(seq.sample_index, len(beams.finished) - 1)].path
        token_ids = path.token_ids
        stopped = token_ids[-1] in seq.stop_ids
        event = state.end(
            seq,
            FinishReason.STOP if stopped else FinishReason.LENGTH,
            token_ids=token_ids,
            logprobs=None if sampling.logprobs is None else path.logprobs,
            stop_token_id=token_ids[-1] if stopped else None,
        )
        if seq.sample_index < sampling.num_samples:
            events.append(event)
            state.counters.num_generated_tokens += len(token_ids)
    return events[::-1]
