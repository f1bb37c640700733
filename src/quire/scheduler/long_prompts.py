"""`LongPrompts`: a long prompt does not hold short ones.

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
of it where a kernel arranges the keys of the context anew in each step (AMX).
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.metrics.engine_stats import QUIET_TIMES
from quire.scheduler.budget import Budget, long_threshold
from quire.scheduler.sequence import Sequence
from quire.scheduler.state import SchedulerState

LATELY_S = 60.0
# Waiting prompts per step whose cached part is looked up; further ones count as if nothing of them were cached.
_MAX_LOOKUPS = 8


class LongPrompts:
    """Which prompts are long in one plan."""

    def __init__(self, state: SchedulerState, budget: Budget, now: float) -> None:
        self._state, self._budget = state, budget
        self.threshold = long_threshold(state.config)
        lately = now - state.last_short_s <= LATELY_S
        self._uncut = 0 if lately else state.config.max_num_batched_tokens
        self._share = self.threshold * (1 if lately else QUIET_TIMES)
        self._num_left: dict[Sequence, int] = {}  # of waiting sequences, without what is cached

    def is_long(self, seq: Sequence, num_left: int) -> bool:
        """Tell whether ``seq``, with so many tokens left to compute, is long."""
        return num_left > self.threshold > 0 and len(seq.token_ids) > self._uncut

    def share(self, prefills: list[Sequence], entering: list[Sequence]) -> None:
        """Divide the step. ``prefills`` run, ``entering`` have a seat if they find blocks, both in order of rank."""
        if not self.threshold:
            return
        num_long = num_short = 0
        for seq in prefills:
            num_left = seq.target - seq.num_planned
            if self.is_long(seq, num_left):
                num_long += 1
            else:
                num_short += num_left
        num_short += self._entering_tokens(prefills, entering)
        self._budget.share_with_long(self._share, num_short, runs=num_long > 0)

    def room(self, seq: Sequence, num_left: int) -> int:
        """Return the tokens that a running sequence with so many left to compute may have in this step."""
        return self._budget.long_room if self.is_long(seq, num_left) else self._budget.short_room

    def room_of_waiting(self, seq: Sequence) -> int:
        """Return the tokens that a waiting sequence may have; 0: it waits for the share, and others may enter first."""
        if not self.threshold:
            return self._budget.left
        return self._budget.long_room if self._is_long_waiting(seq) else self._budget.short_room

    def held_blocks(self, running: Iterable[Sequence]) -> int:
        """Return the blocks that running prompts need yet."""
        if not self.threshold:
            return 0
        cache = self._state.cache
        rows = sum(max(0, -(-seq.target // cache.block_size) - seq.table.num_rows) for seq in running)
        return rows * cache.windows.num_full

    def _entering_tokens(self, prefills: list[Sequence], entering: list[Sequence]) -> int:
        """Return the tokens that short prompts want which find blocks; of some, what a step holds."""
        cache, total = self._state.cache, 0
        num_free = cache.references.num_available - self.held_blocks(prefills)
        for seq in entering:
            if self._is_long_waiting(seq):
                continue
            num_free -= -(-len(seq.token_ids) // cache.block_size) * cache.windows.num_full
            if num_free < 0 or total >= self._budget.left:
                break
            total += self._num_left.get(seq, seq.target)
        return total

    def _is_long_waiting(self, seq: Sequence) -> bool:
        if not self.is_long(seq, seq.target):
            return False
        if seq not in self._num_left:
            if len(self._num_left) == _MAX_LOOKUPS:
                return True
            num_cached = self._state.cache.match(seq.table, seq.token_ids).num_tokens
            self._num_left[seq] = seq.target - num_cached
        return self.is_long(seq, self._num_left[seq])
