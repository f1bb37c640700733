"""`SchedulerState`: everything the parts of the scheduler share, and the moves between waiting, running and ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import import_module

from quire.cache.blocks import BlockTable
from quire.cache.manager import CacheManager
from quire.config import SchedulerConfig
from quire.metrics.engine_stats import EngineStats
from quire.request import FinishReason, Request, TokenEvent, TokenLogprobs
from quire.scheduler.policy import Policies
from quire.scheduler.predictor import Predictor
from quire.scheduler.sequence import ENDED_EPOCH, RequestState, Sequence, SequenceState, StepRecord
from quire.scheduler.waiting import WaitingQueue


@dataclass(slots=True)
class SchedulerState:
    """Shared by the parts of one scheduler; private to this package."""

    config: SchedulerConfig
    start_config: SchedulerConfig  # at the start; `config` changes with the settings
    cache: CacheManager
    predictor: Predictor
    policies: Policies = field(init=False)
    waiting: WaitingQueue = field(default_factory=WaitingQueue)
    running: list[Sequence] = field(default_factory=list)  # in order of admission
    requests: dict[str, RequestState] = field(default_factory=dict)
    sequences: dict[int, Sequence] = field(default_factory=dict)  # id → sequence that has not ended
    in_flight: deque[StepRecord] = field(default_factory=deque)
    gone: list[int] = field(default_factory=list)  # sequences that the worker drops with the next plan
    # Of a pipeline: as many steps are in flight, which share decodes evenly.
    num_stages: int = 1
    chains_steps: bool = True  # the executor takes a sequence while its last token is out
    counters: EngineStats = field(default_factory=EngineStats)  # its gauges are not kept here
    now: float = 0.0  # the time of the last plan, result or request
    next_step: int = 0
    next_seq_id: int = 0

    def new_table(self, request: Request) -> BlockTable:
        """Return an empty table for a sequence of ``request``: its blocks are its adapter's and its salt's alone."""
        adapter = "" if request.adapter is None else request.adapter.key
        table = self.cache.new_table(adapter=adapter, cache_salt=request.terms.cache_salt)
        if request.spans:
            import_module("quire.cache.span_content").add_spans(table, request.spans)
        return table

    def enqueue(self, seq: Sequence) -> None:
        """Let a sequence wait."""
        seq.state = SequenceState.WAITING
        self.rank((seq,))
        self.waiting.add(seq)

    def enqueue_again(self, seq: Sequence) -> None:
        """Let a sequence wait that was let in before, with others of its request or by itself."""
        for on_return in self.policies.on_return:
            on_return(seq)
        self.enqueue(seq)

    def rank(self, sequences: Iterable[Sequence]) -> None:
        """Give sequences their rank: by arrival, unless a policy says otherwise."""
        rank = self.policies.rank
        for seq in sequences:
            seq.key = (seq.group.request.arrival_s, seq.seq_id) if rank is None else rank(seq)

    def start(self, seq: Sequence, num_planned: int, *, forked: bool = False) -> None:
        """A sequence runs from now on: its table is filled, and nothing below ``num_planned`` is computed.

        ``forked``: it takes its blocks from another one, and did not wait.
        """
        seq.state = SequenceState.RUNNING
        seq.num_planned = num_planned
        seq.note_blocks(self.now)
        self.running.append(seq)
        for on_start in self.policies.on_start:
            on_start(seq, forked)

    def note_first_admission(self, seq: Sequence, num_cached: int) -> None:
        """Note what the first admission of a request, that of ``seq``, tells of it."""
        group = seq.group
        group.admitted = True
        group.num_cached_tokens = min(num_cached, seq.num_prompt)
        group.cache_miss = self.cache.miss_of(seq.table, seq.num_prompt, num_cached)
        group.queued_s = self.now - group.request.arrival_s
        self.counters.num_prompt_tokens += seq.num_prompt
        self.counters.num_cached_tokens += group.num_cached_tokens

    def fork_siblings(self, leader: Sequence) -> None:
        """Fork every sibling of a running ``leader`` that is about to compute its last prompt token.

        Full blocks are shared, a partial last block is copied by a move, and each computes the last prompt token
        itself. A sibling that finds no seat or no block waits like any other; by then most of its prompt is in the
        prefix tree.
        """
        num_shared = leader.num_prompt - 1
        assert leader.num_planned == num_shared
        siblings, leader.siblings = leader.siblings, []
        for sibling in siblings:
            has_seat = len(self.running) < self.config.max_num_seqs
            if has_seat and self.cache.fork(leader.table, sibling.table, num_shared):
                self.start(sibling, num_shared, forked=True)
                self.counters.num_forks += 1
            else:
                self.enqueue_again(sibling)

    def make_room(self, seq: Sequence, end: int) -> bool:
        """Give ``seq`` blocks up to token ``end``, preempting sequences that rank behind it; False: not in this step.

        Blocks of a victim that is in flight come free when its step is applied, so no other sequence is preempted while
        enough are on their way. The first in rank gets room in the end: it can preempt all others, and it was not
        admitted unless it fits alone.
        """
        cache = self.cache
        while not cache.allocate(seq.table, end):
            num_needed = (-(-end // cache.block_size) - seq.table.num_rows) * cache.windows.num_groups
            if cache.references.num_available + cache.references.num_coming >= num_needed:
                return False
            victim = max(self.running, key=lambda s: s.key)
            if victim is seq:
                return False
            self.preempt(victim)
        return True

    @property
    def chains(self) -> bool:
        """Whether a sequence may be planned again while its last token is out.

        An engine with drafts does not: how many of them are accepted decides where the sequence goes on.
        """
        return self.chains_steps and self.policies.drafts is None

    def find_next_event(self, seq: Sequence) -> None:
        """Find the position up to which a decode of ``seq`` appends one token and does nothing else.

        That is where the sequence next needs, fills or drops a block, or reaches its last token. It is
        called once the first token is out; while it may have drafts, every decode is an event.
        """
        drafts = self.policies.drafts
        if drafts is None or drafts.is_idle(seq):
            seq.next_event_at = min(self.cache.next_event_at(seq.table), seq.max_planned)

    def rollback(self, seq: Sequence, num_tokens: int) -> None:
        """Take the last ``num_tokens`` computed positions of ``seq`` back: drafts that were rejected."""
        assert seq.num_planned >= len(seq.token_ids) - 1 + num_tokens
        seq.num_planned -= num_tokens
        self.cache.rollback(seq.table, seq.num_planned)

    def stop(self, seq: Sequence) -> None:
        """A running sequence gives up its blocks and its place at the worker."""
        self.running.remove(seq)
        for on_stop in self.policies.on_stop:
            on_stop(seq)
        seq.note_blocks(self.now)
        self.cache.release(seq.table)
        seq.note_blocks(self.now)
        if seq.registered:
            self.gone.append(seq.seq_id)
            seq.registered = False

    def preempt(self, seq: Sequence) -> None:
        """Take a running sequence out, to be computed again later. What is in flight of it will be dropped."""
        self.stop(seq)
        seq.epoch += 1
        seq.num_planned = seq.num_drafts = 0
        seq.num_preemptions += 1
        seq.told_first = False
        seq.next_event_at = 0
        seq.forced = ()
        self.counters.num_preemptions += 1
        if seq.is_beam and self.policies.beams.has_continuations(seq):
            seq.state = SequenceState.PARKED  # it has given what it was to give
            for on_return in self.policies.on_return:
                on_return(seq)
        else:
            self.enqueue_again(seq)

    def end_late(self, seq: Sequence, missed: str) -> TokenEvent:
        """End a sequence that missed the limit named ``missed`` of its deadline."""
        deadline = seq.group.request.terms.deadline
        assert deadline is not None
        text = deadline.missed(missed, len(seq.token_ids) - seq.num_prompt)
        return self.end(seq, FinishReason.DEADLINE, error=text, error_kind="deadline")

    def end_all(
        self,
        group: RequestState,
        reason: FinishReason,
        *,
        error: str | None = None,
        error_kind: str | None = None,
    ) -> list[TokenEvent]:
        """End every sequence of a request; one terminal event for each answer that its client waits for."""
        # Last first, so that siblings go before the leader that they are attached to.
        events = [
            self.end(seq, reason, error=error, error_kind=error_kind)
            for seq in reversed(tuple(group.sequences))
        ]
        # Beams are more than their request has answers.
        return [event for event in events if event.sample_index < group.request.sampling.num_samples]

    def end(
        self,
        seq: Sequence,
        reason: FinishReason,
        *,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] | None = None,
        stop_token_id: int | None = None,
        error: str | None = None,
        error_kind: str | None = None,
        pooled: tuple[float, ...] | None = None,
    ) -> TokenEvent:
        """End a sequence in whatever state it is, and return its terminal event."""
        group = seq.group
        if seq.state is SequenceState.RUNNING:
            self.predictor.note_end(len(seq.token_ids) - seq.num_prompt)
            self.stop(seq)
        elif seq.state is SequenceState.WAITING:
            self.waiting.remove(seq)
        elif seq.state is SequenceState.LOADING_KV:
            self.policies.transfers.forget(seq)
        elif seq.state is SequenceState.ATTACHED:
            next(s for s in group.sequences if seq in s.siblings).siblings.remove(seq)
        seq.state = SequenceState.ENDED
        seq.epoch = ENDED_EPOCH
        del self.sequences[seq.seq_id]
        group.sequences.remove(seq)
        self.counters.kv_block_s += seq.kv_block_s
        for on_end in self.policies.on_end:
            on_end(seq)
        if not group.sequences:
            del self.requests[group.request.request_id]
        if seq.siblings:
            self._promote(seq.siblings)
            seq.siblings = []
        if seq.sample_index >= group.request.sampling.num_samples:
            pass  # a beam beyond the answers
        elif reason is FinishReason.ERROR:
            self.counters.num_failed += 1
        elif reason is FinishReason.ABORT:
            self.counters.num_aborted += 1
        elif reason is FinishReason.DEADLINE:
            self.counters.num_expired += 1
        else:
            self.counters.num_finished += 1
        return TokenEvent(
            group.request.request_id,
            seq.sample_index,
            token_ids,
            logprobs,
            reason,
            stop_token_id,
            error,
            error_kind,
            seq.timing(self.now),
            pooled=pooled,
        )

    def _promote(self, siblings: list[Sequence]) -> None:
        """Their leader ended before the fork: the first sibling computes the prompt for the others."""
        leader = siblings[0]
        leader.siblings = siblings[1:]
        self.enqueue_again(leader)
