"""Beam search: each beam is one of the request's ``width`` `Sequence`s, which live on, fork, or lie parked.

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
from quire.scheduler.policies.beam_search import BeamSearch, Child, Path
from quire.scheduler.policy import Policy
from quire.scheduler.sequence import RequestState, Sequence, SequenceState
from quire.scheduler.state import SchedulerState


class Rule(Policy):
    """The searches of one scheduler."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        # Beams selected since the last plan: (parent, what is forked from it).
        self._forks: list[tuple[Sequence, Sequence]] = []

    def has_continuations(self, seq: Sequence) -> bool:
        """Tell whether a beam has given its continuations, and waits for the others of its depth."""
        beams = seq.group.beams
        return beams is not None and seq in beams.found

    def start(self, group: RequestState) -> None:
        """Queue the first of a request's sequences; the others lie parked until it has given its continuations."""
        leader, *others = group.sequences
        sampling = group.request.sampling
        max_outputs = leader.max_total - leader.num_prompt
        group.beams = BeamSearch(sampling, leader.stop_ids, max_outputs)
        group.beams.paths[leader] = Path()
        for seq in others:
            seq.state = SequenceState.PARKED
        self._state.enqueue(leader)

    def take(self, seq: Sequence, end: int, logprobs: tuple[TokenLogprobs, ...] | None) -> list[TokenEvent]:
        """A step computed ``seq`` up to token ``end`` and sampled: note what it found. The last of a depth selects."""
        group = seq.group
        beams = group.beams
        assert beams is not None
        assert logprobs is not None
        if end != len(seq.token_ids) or seq not in beams.paths:  # its depth is over
            return []
        seq.num_steps += 1
        seq.num_chunks += end == seq.num_prompt
        beams.found[seq] = logprobs[0]
        if not beams.is_complete:
            return []
        children = beams.select()
        if not children:
            return self._deliver(group)
        self._replace(group, children)
        return []

    def fork_selected(self) -> None:
        """Fork what was selected since the last plan, in the step that is planned."""
        state, forks, self._forks = self._state, self._forks, []
        for parent, child in forks:
            if child.state is not SequenceState.PARKED:
                continue  # its request has ended
            num_shared = len(child.token_ids) - 1
            computed = parent.state is SequenceState.RUNNING and parent.num_planned == num_shared
            has_seat = len(state.running) < state.config.max_num_seqs
            if computed and has_seat and state.cache.fork(parent.table, child.table, num_shared):
                state.start(child, num_shared, forked=True)
                state.counters.num_forks += 1
            else:
                state.enqueue_again(child)

    def on_end(self, seq: Sequence) -> None:
        """What a beam beyond the answers has cost goes to the answer that ends next; answers end last."""
        group = seq.group
        if not seq.is_beam:
            return
        if seq.sample_index >= group.request.sampling.num_samples:
            group.beams_engine_s += seq.engine_s
            group.beams_kv_block_s += seq.kv_block_s
            return
        seq.engine_s += group.beams_engine_s
        seq.kv_block_s += group.beams_kv_block_s
        group.beams_engine_s = group.beams_kv_block_s = 0.0

    def park_idle(self) -> bool:
        """Take the seats and blocks of beams that wait for others of their depth; False where there are none.

        For when nothing else can go on: what they found is kept, and those selected compute their last tokens again.
        """
        idle = [seq for seq in self._state.running if seq.is_beam and self.has_continuations(seq)]
        for seq in idle:
            self._state.preempt(seq)
        return bool(idle)

    def _replace(self, group: RequestState, children: list[Child[Sequence]]) -> None:
        beams = group.beams
        assert beams is not None
        firsts = {child.parent: child for child in reversed(children)}  # goes on in its parent's place
        for seq in beams.paths:
            if seq not in firsts:
                self._park(seq)
        parked = iter([seq for seq in group.sequences if seq not in firsts])
        places: list[tuple[Child[Sequence], Sequence]] = []
        for child in children:
            first = firsts[child.parent] is child
            places.append((child, child.parent if first else next(parked)))
        for child, seq in places:
            if seq is not child.parent:
                _become_fork(seq, child)
                self._forks.append((child.parent, seq))
        for child, seq in places:
            if seq is child.parent:
                self._go_on(seq, child.path.logprobs[-1].token_id)
        beams.paths = {seq: child.path for child, seq in places}

    def _go_on(self, seq: Sequence, token_id: int) -> None:
        """Add the selected token to a beam that keeps its place; it runs with all tokens computed, or was parked."""
        num_known = len(seq.token_ids)
        seq.token_ids.append(token_id)
        if seq.state is SequenceState.PARKED:
            self._state.enqueue(seq)
            return
        assert seq.state is SequenceState.RUNNING
        assert seq.num_planned == num_known
        seq.forced = (token_id,)  # its worker has sampled another one

    def _deliver(self, group: RequestState) -> list[TokenEvent]:
        """The search is over: the best hypotheses are the answers."""
        state, beams, sampling = self._state, group.beams, group.request.sampling
        assert beams is not None
        if len(beams.finished) < sampling.num_samples:
            text = f"beam search found {len(beams.finished)} of {sampling.num_samples} answers: too small a vocabulary."
            return state.end_all(group, FinishReason.ERROR, error=text, error_kind="step")
        events = []
        num_steps = max(seq.num_steps for seq in group.sequences)
        num_chunks = max(seq.num_chunks for seq in group.sequences)
        for seq in reversed(tuple(group.sequences)):
            seq.ttft_s, seq.num_steps, seq.num_chunks = (
                state.now - group.request.arrival_s,
                num_steps,
                num_chunks,
            )
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

    def _park(self, seq: Sequence) -> None:
        """A beam, running or parked, has no continuation that lives on: it gives up what it has."""
        if seq.state is SequenceState.RUNNING:
            self._state.stop(seq)
        seq.state = SequenceState.PARKED
        seq.epoch += 1
        seq.forced = ()


def _become_fork(seq: Sequence, child: Child[Sequence]) -> None:
    """Take over the parent's tokens and one more. The parent's own next token is not there yet."""
    seq.token_ids = [*child.parent.token_ids, child.path.logprobs[-1].token_id]
    seq.num_planned = 0
    seq.num_steps, seq.num_chunks = child.parent.num_steps, child.parent.num_chunks
    seq.epoch += 1
    seq.table.chain = []
