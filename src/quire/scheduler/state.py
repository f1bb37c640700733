"""`SchedulerState`: everything the parts of the scheduler share, and the moves between waiting, running and ended."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from quire.cache.block_table import BlockTable
from quire.cache.manager import CacheManager
from quire.config import MAX_DRAFTS, SchedulerConfig
from quire.metrics.engine_stats import STEP_TOKENS, EngineStats, Histogram
from quire.request import FinishReason, Request, TokenEvent, TokenLogprobs
from quire.scheduler.adapters import AdapterSlots
from quire.scheduler.budget import ONE_STAGE, StageRows
from quire.scheduler.draft_control import MAX_VAIN, DraftControl
from quire.scheduler.draft_gain import DraftGain
from quire.scheduler.predictor import Predictor
from quire.scheduler.queue import Deadlines, FairShares, Gate, WaitingQueue, sort_key
from quire.scheduler.sequence import ENDED_EPOCH, RequestState, Sequence, SequenceState
from quire.step import AdapterMove, KvTransfer, SeqPlan


@dataclass(slots=True)
class StepRecord:
    """A step in flight, as the scheduler remembers it. ``sequences`` are parallel to ``seqs``, the plan's."""

    step: int
    sequences: list[Sequence]
    seqs: tuple[SeqPlan, ...]
    gone: tuple[int, ...]
    planned_s: float = 0.0
    num_prompt_tokens: int = 0
    num_drafts: int = 0  # verified
    adapter_moves: tuple[AdapterMove, ...] = ()
    transfers: tuple[KvTransfer, ...] = ()  # begun by this step
    num_tokens: int = 0  # decodes and drafts as well


@dataclass(slots=True)
class SchedulerState:
    """Shared by the parts of one scheduler; private to this package."""

    config: SchedulerConfig
    start_config: SchedulerConfig  # as the engine was built; `config` changes with the policy
    cache: CacheManager
    adapters: AdapterSlots
    predictor: Predictor
    gate: Gate = field(default_factory=Gate)
    waiting: WaitingQueue = field(default_factory=WaitingQueue)
    running: list[Sequence] = field(default_factory=list)  # in order of admission
    requests: dict[str, RequestState] = field(default_factory=dict)
    sequences: dict[int, Sequence] = field(default_factory=dict)  # by id, those not ended
    in_flight: deque[StepRecord] = field(default_factory=deque)
    gone: list[int] = field(default_factory=list)  # sequences that the worker drops with the next plan
    draft_control: DraftControl | None = None  # None: without speculation
    draft_gain: DraftGain = field(default_factory=DraftGain)
    # Of a pipeline: as many steps are in flight, which share decodes and prompt tokens evenly.
    num_stages: int = 1
    stage_rows: StageRows = ONE_STAGE  # of a pipeline
    prompt_run: int = 0  # prompt tokens in the last steps, back to one without any
    chains_steps: bool = True  # whether the executor takes a sequence again while its last token is out
    counters: EngineStats = field(default_factory=EngineStats)  # its gauges are not kept here
    deadlines: Deadlines = field(default_factory=Deadlines)
    # When seats come free, as of a step; see `overload`.
    seats: tuple[tuple[int, ...], list[float], float, int, int] | None = None
    step_tokens: Histogram = field(default_factory=lambda: Histogram(STEP_TOKENS))
    # Beams selected since the last plan: (parent, what is forked from it); see `beam_steps`.
    forks: list[tuple[Sequence, Sequence]] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)  # drafts accepted, by position
    loading: dict[int, Sequence] = field(default_factory=dict)  # by transfer id, those in state LOADING_KV
    new_transfers: list[KvTransfer] = field(default_factory=list)  # begin with the next plan
    next_transfer_id: int = 0
    shares: FairShares = field(default_factory=FairShares)
    last_short_s: float = -math.inf  # when a short prompt entered last; see `long_prompts`
    now: float = 0.0  # the time of the last plan, result or request
    next_step: int = 0
    next_seq_id: int = 0
    next_turn: int = 1

    def new_table(self, request: Request) -> BlockTable:
        """Return an empty table for a sequence of ``request``: its blocks are its adapter's and its salt's alone."""
        adapter = "" if request.adapter is None else request.adapter.key
        return self.cache.new_table(adapter=adapter, cache_salt=request.cache_salt)

    def enqueue(self, seq: Sequence) -> None:
        """Let a sequence wait."""
        seq.state = SequenceState.WAITING
        seq.key = sort_key(self.config.order, seq)
        self.waiting.add(seq)

    def start(self, seq: Sequence, num_planned: int) -> None:
        """A sequence was admitted (its table is filled) and needs no computation below ``num_planned``."""
        seq.state = SequenceState.RUNNING
        seq.num_planned = num_planned
        seq.note_blocks(self.now)
        self.adapters.enter(seq.group.request.adapter)
        self.running.append(seq)

    @property
    def chains(self) -> bool:
        """Whether a sequence may be planned again while its last token is out.

        An engine with drafts does not: how many of them are accepted decides where the sequence goes on.
        """
        return self.chains_steps and self.draft_control is None

    def find_next_event(self, seq: Sequence) -> None:
        """Find the position up to which a decode of ``seq`` appends one token and does nothing else.

        That is where the sequence next needs, fills or drops a block, or reaches its last token. It is
        called once the first token is out; while it may have drafts, every decode is an event.
        """
        control = self.draft_control
        idle = seq.num_vain >= MAX_VAIN or control is None or not control.limit(seq.acceptance)
        if idle and not seq.num_drafts:
            seq.next_event_at = min(self.cache.next_event_at(seq.table), seq.max_planned)

    def rollback(self, seq: Sequence, num_tokens: int) -> None:
        """Take the last ``num_tokens`` computed positions of ``seq`` back: drafts that were rejected."""
        assert seq.num_planned >= len(seq.token_ids) - 1 + num_tokens
        seq.num_planned -= num_tokens
        self.cache.rollback(seq.table, seq.num_planned)

    def stop(self, seq: Sequence) -> None:
        """A running sequence gives up its blocks and its place at the worker."""
        self.running.remove(seq)
        self.adapters.leave(seq.group.request.adapter)
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
        self.gate.return_seat()
        beams = seq.group.beams
        if beams is not None and seq in beams.found:
            seq.state = SequenceState.PARKED  # it has given what it was to give
        else:
            self.enqueue(seq)

    def park(self, seq: Sequence) -> None:
        """A beam, running or parked, has no continuation that lives on: it gives up what it has."""
        if seq.state is SequenceState.RUNNING:
            self.stop(seq)
        seq.state = SequenceState.PARKED
        seq.epoch += 1
        seq.forced = ()

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
            self.loading = {key: other for key, other in self.loading.items() if other is not seq}
        elif seq.state is SequenceState.ATTACHED:
            next(s for s in group.sequences if seq in s.siblings).siblings.remove(seq)
        seq.state = SequenceState.ENDED
        seq.epoch = ENDED_EPOCH
        del self.sequences[seq.seq_id]
        group.sequences.remove(seq)
        self.shares.leave(seq)
        self.counters.kv_block_s += seq.kv_block_s
        seq.settle_beams()
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
        self.gate.return_seat()
        self.enqueue(leader)
