"""A share of each step for long prompts: a long prompt does not hold short ones.

A prompt is long while it has more than `SchedulerConfig.long_prefill_token_threshold` tokens left to compute.

    no short prompt can be computed now    long ones have that many tokens of the step together, in order of rank;
                                           four times as many if no short one came in the last minute
    short prompts can                      long ones have an eighth as many tokens as they, at least a sixteenth of the
                                           threshold, and short ones have the rest of the step

A short one waits for the rest of a step that is at most that long, and shares the next one with few other tokens. The
long one goes on in each step. Waiting prompts that are long are passed over while the share is taken; their seats and
blocks are not held, since each of them is next when the share comes free. The blocks that a running prompt
needs yet are held against those that enter; only what they generate may grow into them.

A prompt that fits in one step is not cut unless short ones have come lately: smaller steps cost some throughput, most
of it where products are fast beside memory (AMX), since each step reads all weights.
"""

from __future__ import annotations

import math

from quire.metrics.engine_stats import LONG_SHARE, QUIET_TIMES, long_part
from quire.scheduler.policy import LOOKAHEAD, Policy
from quire.scheduler.sequence import RequestState, Sequence
from quire.scheduler.state import SchedulerState
from quire.scheduler.waiting import StepRoom

LATELY_S = 60.0
# Waiting prompts per step whose cached part is looked up; further ones count as if nothing of them were cached.
_MAX_LOOKUPS = 8


class Rule(Policy):
    """Knows when a short prompt came last."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._last_short_s = -math.inf

    def on_add(self, group: RequestState) -> None:
        if len(group.request.prompt_token_ids) <= self._state.config.long_prefill_token_threshold:
            self._last_short_s = self._state.now

    def on_start(self, seq: Sequence, forked: bool) -> None:
        if not forked and seq.target - seq.num_planned <= self._state.config.long_prefill_token_threshold:
            self._last_short_s = self._state.now

    def budget(self, room: StepRoom) -> None:
        if self._state.config.long_prefill_token_threshold:
            room.num_extra = LOOKAHEAD
            room.share = LongShare(self._state, room, is_lately=room.now - self._last_short_s <= LATELY_S)


class LongShare:
    """Which prompts are long in one plan, and what they and the others may have of its tokens."""

    def __init__(self, state: SchedulerState, room: StepRoom, *, is_lately: bool) -> None:
        self._state, self._step = state, room
        self._threshold = state.config.long_prefill_token_threshold
        self._uncut = 0 if is_lately else state.config.max_num_batched_tokens
        self._num_left: dict[Sequence, int] = {}  # tokens, without what is cached; waiting sequences
        most = self._threshold * (1 if is_lately else QUIET_TIMES)
        num_long = num_short = 0
        for seq in room.prefills:
            num_left = seq.target - seq.num_planned
            if self._is_long(seq, num_left):
                num_long += 1
            else:
                num_short += num_left
        num_short += self._entering_tokens()
        # Of the tokens left, what long prompts may have, and what is kept for those that run: they go on whatever
        # short ones want.
        self._long = long_part(most, num_short, room.left)
        self._kept = min(self._long, room.left // LONG_SHARE) if num_long else 0

    def room(self, seq: Sequence, num_left: int) -> int:
        return self._long_room if self._is_long(seq, num_left) else self._short_room

    def room_of_waiting(self, seq: Sequence) -> int:
        return self._long_room if self._is_long_waiting(seq) else self._short_room

    def spend(self, num_tokens: int, seq: Sequence, num_left: int) -> None:
        if self._is_long(seq, num_left):
            self._long = max(0, self._long - num_tokens)
            self._kept = max(0, self._kept - num_tokens)

    def running_planned(self) -> None:
        self._kept = 0

    def held_blocks(self, seq: Sequence) -> int:
        cache = self._state.cache
        return max(0, -(-seq.target // cache.block_size) - seq.table.num_rows) * cache.windows.num_full

    @property
    def _long_room(self) -> int:
        return min(self._step.left, self._long)

    @property
    def _short_room(self) -> int:
        return self._step.left - self._kept

    def _is_long(self, seq: Sequence, num_left: int) -> bool:
        """Tell whether ``seq``, with so many tokens left to compute, is long."""
        return num_left > self._threshold > 0 and len(seq.token_ids) > self._uncut

    def _entering_tokens(self) -> int:
        """Return the tokens that short prompts want which find blocks and a seat; of some, what a step holds."""
        if self._step.starved:
            return 0
        cache, total = self._state.cache, 0
        num_free = cache.references.num_available - sum(map(self.held_blocks, self._step.prefills))
        for seq in self._step.entering():
            if self._is_long_waiting(seq):
                continue
            num_free -= -(-len(seq.token_ids) // cache.block_size) * cache.windows.num_full
            if num_free < 0 or total >= self._step.left:
                break
            total += self._num_left.get(seq, seq.target)
        return total

    def _is_long_waiting(self, seq: Sequence) -> bool:
        if not self._is_long(seq, seq.target):
            return False
        if seq not in self._num_left:
            if len(self._num_left) == _MAX_LOOKUPS:
                return True
            num_cached = self._state.cache.match(seq.table, seq.token_ids).num_tokens
            self._num_left[seq] = seq.target - num_cached
        return self._is_long(seq, self._num_left[seq])
