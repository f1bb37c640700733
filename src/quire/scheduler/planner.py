"""`Planner`: what the next step computes: forks, decodes, running prompts, then sequences that may enter."""

from __future__ import annotations

from importlib import import_module

from quire.config import SchedulerConfig
from quire.scheduler.sequence import Sequence, SequenceState, SortKey, StepRecord
from quire.scheduler.state import SchedulerState
from quire.scheduler.waiting import StepRoom
from quire.step import NewSeq, SeqPlan, StepPlan


class Planner:
    """Makes one `StepPlan`. Everything it decides is a function of ``state`` and ``now``."""

    def __init__(self, state: SchedulerState, now: float) -> None:
        self._state = state
        self._now = now
        self._step = state.next_step
        self._new_seqs: list[NewSeq] = []
        self._seqs: list[SeqPlan] = []
        self._sequences: list[Sequence] = []  # parallel to `_seqs`
        self._num_prompt_tokens = self._num_drafts = 0
        # Rank of the sequence that failed to get a block: no lower-ranked one may take a block in this step.
        self._starved: SortKey | None = None

    def plan(self) -> StepPlan | None:
        """Return the plan, or None where nothing can be computed now."""
        state = self._state
        record = state.cache.references.open_step(self._step)
        num_preemptions, policies = state.counters.num_preemptions, state.policies
        if policies.beams is not None:
            policies.beams.fork_selected()
        decodes, prefills, crossing = _sort_running(state)
        decodes = self._choose_decodes(decodes, crossing)
        prefills.sort(key=lambda s: s.key)
        left = state.config.max_num_batched_tokens - len(decodes)
        room = self._room = StepRoom(
            self._now, left, decodes, prefills, state.waiting, state.running, state.config.max_num_seqs,
            self._starved is not None,
        )  # fmt: skip
        for budget in policies.budget:
            budget(room)
        for seq in prefills:
            if room.left > 0 and seq.state is SequenceState.RUNNING:
                self._plan_chunk(seq)
        if room.share is not None:
            room.share.running_planned()
        if state.counters.num_preemptions > num_preemptions:
            decodes = [seq for seq in decodes if seq.state is SequenceState.RUNNING]
        elif self._starved is None:  # else a preempted sequence would come straight back
            self._admit()
        self._emit_decodes(decodes, room.drafts)
        transfers = () if policies.transfers is None else policies.transfers.take_new()
        if policies.states is not None:
            policies.states.complete(self._sequences, self._seqs, self._new_seqs)
        empty = not (self._seqs or record.moves or record.state_moves or transfers)
        state.cache.references.end_planning(empty=empty)
        if empty:
            return None
        loads = () if policies.adapters is None else policies.adapters.slots.take_moves()
        gone, state.gone = tuple(state.gone), []
        seqs, new, moves = tuple(self._seqs), tuple(self._new_seqs), tuple(record.moves)
        planned = StepRecord(
            self._step, self._sequences, seqs, gone, self._now, self._num_prompt_tokens, self._num_drafts, loads,
            transfers,
        )  # fmt: skip
        state.in_flight.append(planned)
        state.next_step += 1
        for on_plan in policies.on_plan:
            on_plan(planned)
        return StepPlan(
            self._step, new, seqs, gone, moves, tuple(record.state_moves), loads, transfers,
            state.config.max_draft_paths,
        )  # fmt: skip

    def _choose_decodes(self, decodes: list[Sequence], crossing: list[Sequence]) -> list[Sequence]:
        """Return the decodes of this step, with a block for each: as many as the budget allows."""
        state = self._state
        limit = min(state.config.max_num_batched_tokens, -(-len(state.running) // state.num_stages))
        if len(decodes) > limit:
            in_turn = import_module("quire.scheduler.in_turn").in_turn
            return list(in_turn(decodes, limit, self._step, self._find_room))
        if not crossing:
            return decodes
        crossing.sort(key=lambda seq: seq.key)
        without = [seq for seq in crossing if not self._find_room(seq, seq.num_planned + 1)]
        return [seq for seq in decodes if seq not in without] if without else decodes

    def _find_room(self, seq: Sequence, end: int) -> bool:
        """Give a running sequence blocks up to ``end``. Once this fails for one, no lower-ranked one gets a block."""
        preempted = seq.state is not SequenceState.RUNNING  # for another in this plan
        if preempted or self._barred(seq):
            return False
        if self._state.make_room(seq, end):
            return True
        self._starved = seq.key
        return False

    def _barred(self, seq: Sequence) -> bool:
        return self._starved is not None and seq.key > self._starved

    def _plan_chunk(self, seq: Sequence) -> None:
        """Plan the next tokens of a running sequence that has many to compute."""
        cache = self._state.cache
        todo = seq.target - seq.num_planned
        uncut, room = must_be_uncut(self._state.config, todo), self._room
        num_tokens = min(todo, room.left if room.share is None else room.share.room(seq, todo))
        whole = self._state.policies.whole_spans
        if whole is not None:
            num_tokens = whole.tokens(seq, num_tokens, room.left)
        if num_tokens <= 0 or (uncut and todo > room.left):
            return
        end = seq.num_planned + num_tokens
        if self._barred(seq):
            capacity = seq.table.capacity
            if capacity <= seq.num_planned or (uncut and capacity < end):
                return
            end = min(end, capacity)
        elif not cache.allocate(seq.table, end):
            least = end if uncut else seq.num_planned + 1 if whole is None else whole.least_end(seq)
            if cache.reachable_end(seq.table) < least and not self._find_room(seq, least):
                return
            end = min(end, cache.reachable_end(seq.table))
            allocated = cache.allocate(seq.table, end)
            assert allocated
        if whole is not None:
            end = whole.end(seq, end)
        if end > seq.num_planned:
            self._emit(seq, end)

    def _admit(self) -> None:
        """Let sequences in, in order, until seats, tokens or blocks run out."""
        state, room = self._state, self._room
        share, filters = room.share, room.filters
        seats = room.free_seats()
        if seats <= 0 or room.left <= 0:
            return
        num_held = 0 if share is None else sum(map(share.held_blocks, room.prefills))
        for seq in room.in_order(seats):
            if room.left <= 0 or seats == 0 or len(state.running) >= state.config.max_num_seqs:
                break
            tokens = room.left if share is None else share.room_of_waiting(seq)
            if tokens == 0 or (filters and not all(lets_in(seq) for lets_in in filters)):
                continue
            if not self._admit_one(seq, tokens, num_held):
                break
            num_held += 0 if share is None else share.held_blocks(seq)
            seats -= 1

    def _admit_one(self, seq: Sequence, room: int, num_held: int) -> bool:
        state = self._state
        target = seq.target
        uncut = must_be_uncut(state.config, target)
        seq.table.reads_prefix = seq.group.reads_prefix
        admitted = state.cache.admit(seq.table, seq.token_ids, target, room, uncut=uncut, num_held=num_held)
        if admitted is None:
            return False
        state.waiting.remove(seq)
        state.start(seq, admitted.num_cached)
        if not seq.group.admitted:
            state.note_first_admission(seq, admitted.num_cached)
        if admitted.num_scheduled:
            end, whole = admitted.num_cached + admitted.num_scheduled, state.policies.whole_spans
            if whole is None or whole.end(seq, end) == end:
                self._emit(seq, end)
            elif whole.fits(seq):
                self._plan_chunk(seq)
            return True
        # A leader whose prompt, but its last token, is cached: its own last token comes before its siblings' blocks.
        state.cache.allocate(seq.table, seq.num_prompt)
        self._state.fork_siblings(seq)
        for member in state.running[state.running.index(seq) :]:
            end = member.num_planned + 1
            if self._room.left and state.cache.allocate(member.table, end):
                self._emit(member, end)
        return True

    def _emit(self, seq: Sequence, end: int) -> None:
        """Plan a chunk of ``seq`` up to ``end``; its blocks are there."""
        num_tokens = end - seq.num_planned
        self._room.left -= num_tokens
        if self._room.share is not None:
            self._room.share.spend(num_tokens, seq, seq.target - seq.num_planned)
        self._num_prompt_tokens += num_tokens
        self._seqs.append(self._plan_tokens(seq, end))
        self._sequences.append(seq)

    def _emit_decodes(self, decodes: list[Sequence], drafts: dict[Sequence, int]) -> None:
        """Plan one token each, and the drafts. This loop and that of `outcome` are the engine's hottest."""
        step, add = self._step, self._seqs.append
        num_events = 0
        for seq in decodes:
            start = seq.num_planned
            if start < seq.next_event_at:
                add(SeqPlan(seq.seq_id, seq.epoch, start, 1))
                seq.table.last_step = step
                seq.num_planned = start + 1
            else:
                add(self._plan_tokens(seq, start + 1, drafts.get(seq, 0)))
                num_events += 1
        self._sequences += decodes
        self._state.counters.num_computed_tokens += len(decodes) - num_events

    def _plan_tokens(self, seq: Sequence, end: int, num_drafts: int = 0) -> SeqPlan:
        """Plan the known tokens of ``seq`` up to ``end``, and so many drafts behind them; its blocks are there."""
        state, start, table = self._state, seq.num_planned, seq.table
        assert start < end
        assert end + num_drafts <= table.capacity
        if not seq.registered:  # the worker is told of a sequence once per admission
            seq.registered = True
            self._new_seqs.append(_new_seq(seq))
        samples = end >= len(seq.token_ids)
        next_drafts = 0
        if samples and state.policies.drafts is not None:
            next_drafts = state.policies.drafts.room(seq, end, num_drafts)
            self._num_drafts += num_drafts
        state.counters.num_chunks += not samples
        state.counters.num_computed_tokens += end + num_drafts - start
        seq.num_planned = end + num_drafts
        table.last_step = self._step
        if start < seq.num_prompt:
            state.cache.publisher.publish(table, seq.token_ids, min(end, seq.num_prompt), planned=True)
        block_start, new_block_ids = table.take_unsent()
        seq.note_blocks(self._now)
        if new_block_ids and seq.told_first:
            state.find_next_event(seq)
        forced, seq.forced = seq.forced, ()
        return SeqPlan(
            seq.seq_id, seq.epoch, start, seq.num_planned - start, block_start, new_block_ids, num_drafts, next_drafts,
            forced,
        )  # fmt: skip


def _sort_running(state: SchedulerState) -> tuple[list[Sequence], list[Sequence], list[Sequence]]:
    """Return sequences with one token to compute, those with more, and of the former those that need a block.

    Leaders that are ready fork first.
    """
    decodes: list[Sequence] = []
    prefills: list[Sequence] = []
    crossing: list[Sequence] = []
    chains, add = state.chains, decodes.append
    for seq in state.running:  # forks append to it during this loop
        planned = seq.num_planned
        if not chains and planned >= len(seq.token_ids):
            continue  # its last token is out
        if planned < seq.next_event_at:
            add(seq)
            continue
        if seq.siblings:
            if planned < seq.num_prompt - 1:
                prefills.append(seq)
                continue
            state.fork_siblings(seq)
        if planned + 1 < len(seq.token_ids):
            prefills.append(seq)
        elif planned < seq.max_planned:  # else its last token is on its way
            add(seq)
            if planned >= seq.table.capacity:
                crossing.append(seq)
    return decodes, prefills, crossing


def _new_seq(seq: Sequence) -> NewSeq:
    group, request = seq.group, seq.group.request
    return NewSeq(
        seq.seq_id,
        seq.epoch,
        request.prompt_token_ids,
        seq.output_token_ids,
        seq.sampling,
        seq.sample_index,
        seq.adapter_slot,
        grammar=request.grammar,
        prompt_logprobs=seq.sampling.prompt_logprobs if group.wants_prompt_logprobs else None,
        pooling=request.pooling,
        spans=request.spans,
    )


def must_be_uncut(config: SchedulerConfig, num_tokens: int) -> bool:
    """Tell whether a chunk of ``num_tokens`` may not be cut.

    Without chunked prefill a prompt is computed in one step or waits. Only what can never fit a step is cut:
    a sequence preempted after its output outgrew the budget, which cannot be rejected any more.
    """
    return not config.enable_chunked_prefill and num_tokens <= config.max_num_batched_tokens
