"""What the next step computes: forks, decodes, drafts, running prompts, then sequences that may enter."""

from __future__ import annotations

from quire.cache.manager import CacheManager
from quire.scheduler.adapters import AdapterGate
from quire.scheduler.beam_steps import fork_beams
from quire.scheduler.budget import Budget
from quire.scheduler.drafts import choose_drafts, room_for_drafts
from quire.scheduler.long_prompts import LongPrompts
from quire.scheduler.sequence import Sequence, SequenceState, SortKey
from quire.scheduler.state import SchedulerState, StepRecord
from quire.step import NewSeq, SeqPlan, StepPlan

# Waiting sequences looked at per step: longest-prefix looks up their prefixes, and those whose adapter has no slot are
# passed over. Looking at all of a long queue would take longer than a step.
_LOOKAHEAD = 128


class Planner:
    """Makes one `StepPlan`. Everything it decides is a function of ``state`` and ``now``."""

    def __init__(self, state: SchedulerState, now: float) -> None:
        self._state = state
        self._now = now
        self._step = state.next_step
        self._budget = Budget(state.config, state.num_stages, state.stage_rows)
        self._long = LongPrompts(state, self._budget, now)
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
        num_preemptions = state.counters.num_preemptions
        if state.forks:
            fork_beams(state)
        decodes, prefills, crossing = self._sort_running()
        decodes = self._choose_decodes(decodes, crossing)
        self._budget.take_decodes(len(decodes), _prompt_tokens(state, prefills))
        drafts: dict[Sequence, int] = {}
        control = state.draft_control
        if control is not None and control.any_held and self._starved is None:
            control.any_held = False
            drafts = choose_drafts(state, decodes, self._budget.left)
            self._budget.left -= sum(drafts.values())
        prefills.sort(key=lambda s: s.key)
        self._long.share(prefills, _entering(state, self._now) if self._starved is None else [])
        for seq in prefills:
            if self._budget.left and seq.state is SequenceState.RUNNING:
                self._plan_chunk(seq)
        self._budget.keep_nothing()
        if state.counters.num_preemptions > num_preemptions:
            decodes = [seq for seq in decodes if seq.state is SequenceState.RUNNING]
        elif self._starved is None:  # else a sequence that was just preempted would come straight back
            self._admit(prefills)
        self._emit_decodes(decodes, drafts)
        transfers, state.new_transfers = tuple(state.new_transfers), []
        empty = not self._seqs and not record.moves and not transfers
        state.cache.references.end_planning(empty=empty)
        if empty:
            return None
        state.prompt_run = state.prompt_run + self._num_prompt_tokens if self._num_prompt_tokens else 0
        gone, state.gone = tuple(state.gone), []
        seqs, loads = tuple(self._seqs), state.adapters.take_moves()
        state.in_flight.append(
            StepRecord(
                self._step, self._sequences, seqs, gone, self._now, self._num_prompt_tokens, self._num_drafts, loads,
                transfers,
            )
        )  # fmt: skip
        state.next_step += 1
        new, moves = tuple(self._new_seqs), tuple(record.moves)
        return StepPlan(self._step, new, seqs, gone, moves, loads, transfers, state.config.max_draft_paths)

    def _sort_running(self) -> tuple[list[Sequence], list[Sequence], list[Sequence]]:
        """Return sequences with one token to compute, those with more, and of the former those that need a block.

        Leaders that are ready fork first.
        """
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        crossing: list[Sequence] = []
        chains, add = self._state.chains, decodes.append
        for seq in self._state.running:  # forks append to it during this loop
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
                fork_siblings(self._state, seq)
            if planned + 1 < len(seq.token_ids):
                prefills.append(seq)
            elif planned < seq.max_planned:  # else its last token is on its way
                add(seq)
                if planned >= seq.table.capacity:
                    crossing.append(seq)
        return decodes, prefills, crossing

    def _choose_decodes(self, decodes: list[Sequence], crossing: list[Sequence]) -> list[Sequence]:
        """Return the decodes of this step, with a block for each: as many as the budget allows."""
        if len(decodes) > (limit := self._budget.decode_limit(len(self._state.running))):
            return self._choose_in_turn(decodes, limit)
        if not crossing:
            return decodes
        crossing.sort(key=lambda seq: seq.key)
        without = [seq for seq in crossing if not self._find_room(seq, seq.num_planned + 1)]
        return [seq for seq in decodes if seq not in without] if without else decodes

    def _choose_in_turn(self, decodes: list[Sequence], limit: int) -> list[Sequence]:
        """Round robin: the sequence that waited longest for a turn comes first."""
        chosen: list[Sequence] = []
        for seq in sorted(decodes, key=lambda seq: seq.turn):
            end = seq.num_planned + 1
            if end <= seq.table.capacity or self._find_room(seq, end):
                chosen.append(seq)
                seq.turn = self._state.next_turn
                self._state.next_turn += 1
                if len(chosen) == limit:
                    break
        return chosen

    def _find_room(self, seq: Sequence, end: int) -> bool:
        """Give a running sequence blocks up to ``end``. Once this fails for one, no lower-ranked one gets a block."""
        preempted = seq.state is not SequenceState.RUNNING  # for another in this plan
        if preempted or self._barred(seq):
            return False
        if make_room(self._state, seq, end):
            return True
        self._starved = seq.key
        return False

    def _barred(self, seq: Sequence) -> bool:
        return self._starved is not None and seq.key > self._starved

    def _plan_chunk(self, seq: Sequence) -> None:
        """Plan the next tokens of a running sequence that has many to compute."""
        cache = self._state.cache
        todo = seq.target - seq.num_planned
        whole = self._budget.must_be_whole(todo)
        num_tokens = min(todo, self._long.room(seq, todo))
        if num_tokens == 0 or (whole and todo > self._budget.left):
            return
        end = seq.num_planned + num_tokens
        if self._barred(seq):
            room = seq.table.capacity
            if room <= seq.num_planned or (whole and room < end):
                return
            end = min(end, room)
        elif not cache.allocate(seq.table, end):
            least = end if whole else seq.num_planned + 1
            if cache.reachable_end(seq.table) < least and not self._find_room(seq, least):
                return
            end = min(end, cache.reachable_end(seq.table))
            allocated = cache.allocate(seq.table, end)
            assert allocated
        self._emit(seq, end)

    def _admit(self, prefills: list[Sequence]) -> None:
        """Let sequences in, in order, until seats, tokens or blocks run out. ``prefills`` run already."""
        state = self._state
        seats = free_seats(state, self._now)
        if seats <= 0 or self._budget.left == 0:
            return
        adapters, num_held = AdapterGate(state.adapters), self._long.held_blocks(prefills)
        for seq in _in_order_of_entry(state, seats):
            if self._budget.left == 0 or seats == 0 or len(state.running) >= state.config.max_num_seqs:
                break
            room = self._long.room_of_waiting(seq)
            if room == 0 or not adapters.lets_in(seq):
                continue
            if not self._admit_one(seq, room, num_held):
                break
            num_held += self._long.held_blocks((seq,))
            seats -= 1

    def _admit_one(self, seq: Sequence, room: int, num_held: int) -> bool:
        state = self._state
        target = seq.target
        whole = self._budget.must_be_whole(target)
        seq.table.reads_prefix = seq.group.reads_prefix
        admitted = state.cache.admit(seq.table, seq.token_ids, target, room, whole=whole, num_held=num_held)
        if admitted is None:
            return False
        state.waiting.remove(seq)
        state.gate.enter()
        state.start(seq, admitted.num_cached)
        _note_admission(state, seq, admitted.num_cached, self._now)
        if admitted.num_scheduled:
            self._emit(seq, admitted.num_cached + admitted.num_scheduled)
            return True
        # A leader whose prompt, but its last token, is cached: its own last token comes before its siblings' blocks.
        state.cache.allocate(seq.table, seq.num_prompt)
        fork_siblings(state, seq)
        for member in state.running[state.running.index(seq) :]:
            end = member.num_planned + 1
            if self._budget.left and state.cache.allocate(member.table, end):
                self._emit(member, end)
        return True

    def _emit(self, seq: Sequence, end: int) -> None:
        """Plan a chunk of ``seq`` up to ``end``; its blocks are there."""
        num_tokens = end - seq.num_planned
        self._budget.spend(num_tokens, is_long=self._long.is_long(seq, seq.target - seq.num_planned))
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
            self._new_seqs.append(_new_seq(seq, state.adapters.slot_of(seq.group.request.adapter)))
        samples = end >= len(seq.token_ids)
        next_drafts = 0
        if samples and state.draft_control is not None:
            next_drafts = room_for_drafts(state, state.draft_control, seq, end, num_drafts)
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
            seq.seq_id,
            seq.epoch,
            start,
            seq.num_planned - start,
            block_start,
            new_block_ids,
            num_drafts,
            next_drafts,
            forced,
        )


def _prompt_tokens(state: SchedulerState, prefills: list[Sequence]) -> int:
    """Return the tokens of the prompts that a pipeline computes in one go, those before this step included."""
    if state.num_stages == 1:
        return 0
    left = sum(seq.target - seq.num_planned for seq in prefills)
    return state.prompt_run + left + state.waiting.num_tokens


def _new_seq(seq: Sequence, adapter_slot: int) -> NewSeq:
    group, request = seq.group, seq.group.request
    return NewSeq(
        seq.seq_id,
        seq.epoch,
        request.prompt_token_ids,
        seq.output_token_ids,
        seq.sampling,
        seq.sample_index,
        adapter_slot,
        grammar=request.grammar,
        prompt_logprobs=seq.sampling.prompt_logprobs if group.wants_prompt_logprobs else None,
        pooling=request.pooling,
    )


def _note_admission(state: SchedulerState, seq: Sequence, num_cached: int, now: float) -> None:
    """Note what an admission, and the first one of a request, tells of it."""
    if seq.target - num_cached <= state.config.long_prefill_token_threshold:
        state.last_short_s = now
    state.shares.charge_prompt(seq, seq.num_prompt - num_cached)
    group = seq.group
    if group.admitted:
        return
    group.admitted = True
    group.num_cached_tokens = min(num_cached, seq.num_prompt)
    group.cache_miss = cache_miss(state.cache, seq, num_cached)
    group.queued_s = now - group.request.arrival_s
    state.counters.num_prompt_tokens += seq.num_prompt
    state.counters.num_cached_tokens += group.num_cached_tokens


def cache_miss(cache: CacheManager, seq: Sequence, num_cached: int) -> str:
    """Say why no more than ``num_cached`` tokens of a prompt came from the prefix cache; empty where none could."""
    size = cache.block_size
    if not cache.config.enable_prefix_caching:
        return "disabled"
    if not seq.group.reads_prefix:
        return "whole prompt wanted"
    if num_cached >= min(seq.num_prompt // size * size, seq.num_prompt - 1):
        return "" if num_cached else "shorter than a block"
    return "not in the cache from there on" if num_cached else "not in the cache"


def free_seats(state: SchedulerState, now: float) -> int:
    """Return how many sequences the gate and the limit let in."""
    config, num_waiting = state.config, len(state.waiting)
    oldest_s = state.waiting.oldest_arrival_s() if num_waiting and config.gate == "dynamic" else 0.0
    seats = state.gate.seats(config, now, len(state.running), num_waiting, oldest_s)
    return min(seats, config.max_num_seqs - len(state.running))


def _entering(state: SchedulerState, now: float) -> list[Sequence]:
    """Return the sequences that would enter next if tokens and blocks allowed; none where no share depends on it."""
    if not state.config.long_prefill_token_threshold or not state.waiting:
        return []
    seats = free_seats(state, now)
    return _in_order_of_entry(state, seats) if seats > 0 else []


def _in_order_of_entry(state: SchedulerState, count: int) -> list[Sequence]:
    """Return the first ``count`` of the waiting sequences, in the order in which they may enter.

    With adapters, or a share for long prompts, there are more, since some may be passed over.
    """
    if state.adapters.num_slots or state.config.long_prefill_token_threshold:
        count += _LOOKAHEAD
    if state.config.order == "fair":
        return state.shares.order(state.waiting.by_tenant, state.running, count)
    if state.config.order != "longest-prefix":
        return state.waiting.first(count)
    nearest = state.waiting.first(max(count, _LOOKAHEAD))
    match = state.cache.match
    nearest.sort(key=lambda seq: -match(seq.table, seq.token_ids).num_tokens)  # stable: ties by arrival
    return nearest[:count]


def fork_siblings(state: SchedulerState, leader: Sequence) -> None:
    """Fork every sibling of a running ``leader`` that is about to compute its last prompt token.

    Full blocks are shared, a partial last block is copied by a move, and each computes the last prompt token itself. A
    sibling that finds no seat or no block waits like any other; by then most of its prompt is in the prefix tree.
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


def make_room(state: SchedulerState, seq: Sequence, end: int) -> bool:
    """Give ``seq`` blocks up to token ``end``, preempting sequences that rank behind it; False: not in this step.

    Blocks of a victim that is in flight come free when its step is applied, so no other sequence is preempted while
    enough are on their way. The first in rank gets room in the end: it can preempt all others, and it was not admitted
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
