"""`SloController`: holds TPOT by what a step may cost. A pure function of the steps that were computed.

Every sequence that decodes waits for the whole step, so its TPOT is the mean of the steps it lives through. After each
step the controller asks the step-time model, corrected by what steps really took,

    running limit   how many sequences can decode in X at all
    chunk budget    how many prompt rows fit in X beside the decodes of the next step

and sends both as a `PolicyChange`. Without decodes nobody waits: the whole budget is free. Each step is held, not their
mean: letting long steps use what short ones left gained no goodput on any of three traces, and a request with a short
output paid for it (benchmarks/slo_controller.py, 2026-11-21).
Tokens do not depend on any of this (DESIGN §1.3); only when they come does.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from quire.config import SchedulerConfig
from quire.plan.cost_model import StepFeatures, StepTime, features
from quire.scheduler.policy import PolicyChange
from quire.step import StepPlan

MARGIN = 0.92  # of the limit: what p95 is above the mean, and the model's error
MEMORY = 0.1  # weight of the newest step in the running means
REFRESH = 4  # steps after which the same number of decodes is thought about again: it takes 0.1 ms
MIN_CHUNK = 16  # rows: a prompt always goes on
WORTHWHILE = 1 / 16  # a smaller change of a setting is not sent
CONTROLLED = {
    "max_num_seqs": "_limit",
    "max_num_batched_tokens": "_budget",
}  # settings, and where their values are


@dataclass(slots=True)
class _Mean:
    """An exponential mean that begins at its first value."""

    value: float
    seen: bool = False

    def add(self, value: float) -> None:
        self.value += (value - self.value) * (MEMORY if self.seen else 1.0)
        self.seen = True


class SloController:
    """Call `submitted` and `applied` for every step, in order; send on what `applied` returns."""

    def __init__(self, step_time: StepTime, config: SchedulerConfig, tpot_s: float) -> None:
        assert tpot_s > 0
        self._step_time = step_time
        self._aim_s = tpot_s * MARGIN
        self._most = config  # what a person set: never exceeded
        self._budget = config.max_num_batched_tokens
        self._limit = config.max_num_seqs
        self.pinned: set[str] = set()  # settings that a person changed: theirs until released
        self._context = _Mean(config.max_model_len / 4)  # keys a decode reads
        self._chunk_keys = _Mean(config.max_model_len / 4)  # keys a chunk's row sees
        self._decode_ratio = _Mean(1.0)  # seconds measured / modelled, steps of decodes alone
        self._mixed_ratio = _Mean(1.0)
        self._out: deque[tuple[StepFeatures, int, float]] = deque()
        self._last_s = 0.0
        self._asked, self._age = -1, 0  # the decodes that the settings are for, and for how many steps

    def submitted(self, plan: StepPlan, now: float) -> None:
        """A step was handed to the executor."""
        decodes = sum(seq.num_known_tokens == 1 for seq in plan.seqs)
        self._out.append((features(plan, {seq.seq_id for seq in plan.seqs}), decodes, now))

    def applied(self, now: float, *, failed: bool = False) -> PolicyChange | None:
        """The oldest step is over. Return new settings, where they differ enough to matter."""
        step, num_decodes, submitted_s = self._out.popleft()
        seconds = now - max(submitted_s, self._last_s)  # steps in flight wait for each other
        self._last_s = now
        if failed or not step.num_tokens:
            return None
        self._learn(step, num_decodes, seconds)
        # Whoever was in this step decodes in the next one, but those who are still in their prompts.
        coming = num_decodes + (step.num_seqs > num_decodes)
        self._age += 1
        if coming == self._asked and self._age < REFRESH:
            return None
        self._asked, self._age = coming, 0
        return self._change(coming)

    def pin(self, change: PolicyChange, release: tuple[str, ...] = ()) -> None:
        """A person changed settings: those of this controller that are named are theirs, until they release them."""
        for name, mine in CONTROLLED.items():
            value = getattr(change, name)
            if value is not None:
                self.pinned.add(name)
                setattr(self, mine, value)  # what is in force, which the next wish is compared with
            elif name in release:
                self.pinned.discard(name)
        self._asked = -1

    def unpinned(self, change: PolicyChange) -> PolicyChange:
        """Return ``change`` without what is pinned."""
        return replace(change, **dict.fromkeys(self.pinned)) if self.pinned else change

    def decode_s(self, num_decodes: int) -> float:
        """Seconds of a step of so many decodes, as steps have been lately."""
        keys = round(num_decodes * self._context.value)
        step = StepFeatures(num_decodes, num_decodes, num_decodes, keys, 0, 0)
        return self._step_time.seconds(step) * self._decode_ratio.value

    def mixed_s(self, num_decodes: int, rows: int) -> float:
        """Seconds of a step with a chunk of ``rows`` beside the decodes."""
        pairs = round(rows * self._chunk_keys.value)
        chunk_kv = round(self._chunk_keys.value) + rows
        keys = round(num_decodes * self._context.value)
        step = StepFeatures(num_decodes + rows, num_decodes + 1, num_decodes + 1, keys, chunk_kv, pairs)
        return self._step_time.seconds(step) * self._mixed_ratio.value

    def _learn(self, step: StepFeatures, num_decodes: int, seconds: float) -> None:
        modelled = self._step_time.seconds(step)
        if modelled <= 0.0:
            return
        ratio = min(max(seconds / modelled, 0.1), 10.0)  # a page fault is no new machine
        chunk_rows = step.num_tokens - num_decodes
        if chunk_rows > 0:
            self._chunk_keys.add(step.chunk_pairs / chunk_rows)
            self._mixed_ratio.add(ratio)
            if not self._decode_ratio.seen:
                self._decode_ratio.value = self._mixed_ratio.value
        else:
            self._decode_ratio.add(ratio)
            if not self._mixed_ratio.seen:
                self._mixed_ratio.value = self._decode_ratio.value
        if num_decodes:
            self._context.add(step.decode_kv_tokens / num_decodes)

    def _change(self, num_decodes: int) -> PolicyChange | None:
        limit = self._running_limit()
        budget = self._most.max_num_batched_tokens
        if num_decodes:
            budget = min(budget, num_decodes + self.chunk(num_decodes))
        new_limit = limit if "max_num_seqs" not in self.pinned and _differs(limit, self._limit) else None
        new_budget = (
            budget if "max_num_batched_tokens" not in self.pinned and _differs(budget, self._budget) else None
        )
        if new_limit is None and new_budget is None:
            return None
        self._limit, self._budget = new_limit or self._limit, new_budget or self._budget
        return PolicyChange(max_num_seqs=new_limit, max_num_batched_tokens=new_budget)

    def _running_limit(self) -> int:
        """The most sequences that decode within the aim; at least one runs."""
        low, high = 1, self._most.max_num_seqs
        if self.decode_s(high) <= self._aim_s:
            return high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.decode_s(middle) <= self._aim_s else (low, middle)
        return low

    def chunk(self, num_decodes: int) -> int:
        """The most prompt rows beside ``num_decodes`` decodes within the aim."""
        low, high = MIN_CHUNK, self._most.max_num_batched_tokens
        if self.mixed_s(num_decodes, high) <= self._aim_s:
            return high
        while high - low > MIN_CHUNK // 2:
            middle = (low + high) // 2
            low, high = (middle, high) if self.mixed_s(num_decodes, middle) <= self._aim_s else (low, middle)
        return low


def _differs(new: int, old: int) -> bool:
    return abs(new - old) > old * WORTHWHILE or (new != old and new < 32)
