"""`Scheduler`: requests in, plans out, results in, events out. A function of its inputs and of ``now``; no clock.

    add / abort / finish / abort_all        → TokenEvents (refusals and other ends)
    transfers.load / store / end            blocks from or to another tier or peer
    next_action(now)                        → Step(plan) | Sleep(until_s) | Wait()
    apply(result, now)                      → TokenEvents
    fail_in_flight(error)                   → TokenEvents: what is in flight will never come back

Every sequence ends with exactly one terminal event, whatever happens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from quire.cache.events import EventBuffer
from quire.cache.manager import CacheManager, reclaim
from quire.config import CacheConfig, SchedulerConfig
from quire.cost.cost_model import StepTime
from quire.metrics.engine_stats import EngineStats
from quire.request import FinishReason, Request, TokenEvent
from quire.scheduler.adapters import AdapterSlots
from quire.scheduler.admission import add_request
from quire.scheduler.beam_steps import end_all, park_idle
from quire.scheduler.budget import ONE_STAGE, StageRows, long_threshold
from quire.scheduler.deadline import demote, expire
from quire.scheduler.draft_control import DraftControl
from quire.scheduler.outcome import apply_result
from quire.scheduler.planner import Planner
from quire.scheduler.predictor import Predictor
from quire.scheduler.slo import PolicyChange, change_policy
from quire.scheduler.state import SchedulerState
from quire.scheduler.transfers import Transfers
from quire.step import StepPlan, StepResult


class Step(NamedTuple):
    """Submit ``plan``."""

    plan: StepPlan


class Sleep(NamedTuple):
    """Nothing can be computed before ``until_s``, unless a message or a result arrives."""

    until_s: float


class Wait(NamedTuple):
    """Nothing can be computed before a message or a result arrives."""


class Scheduler:
    """gate × order × budget over one cache."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache_config: CacheConfig,
        events: EventBuffer | None = None,
        *,
        chains_steps: bool = True,
        num_stages: int = 1,
        stage_rows: StageRows = ONE_STAGE,
        step_time: StepTime | None = None,
    ) -> None:
        """``chains_steps``: the executor's; ``num_stages``: of its pipeline; ``step_time``: a model of its steps.

        ``stage_rows``: of a pipeline, see `budget.stage_rows`.
        """
        self.predictor = Predictor(config, step_time)
        self.cache = CacheManager(cache_config, events)
        self.cache_events = events  # for a gateway to drain; None: off
        self._state = SchedulerState(
            config,
            config,
            self.cache,
            AdapterSlots(config.max_loras),
            self.predictor,
            chains_steps=chains_steps,
            num_stages=num_stages,
            stage_rows=stage_rows,
            draft_control=DraftControl(config) if config.max_num_drafts else None,
        )
        self.transfers = Transfers(self._state)
        self._num_peak_blocks = 0

    @property
    def config(self) -> SchedulerConfig:
        """The settings in force; `change_policy` replaces them."""
        return self._state.config

    def add(self, request: Request, now: float) -> list[TokenEvent]:
        """Queue a request. Refusals are its terminal events: ``error_kind`` "capacity" or "never_fits"."""
        self._state.now = now
        return add_request(self._state, request, now)

    def abort(self, request_id: str) -> list[TokenEvent]:
        """End every sequence of a request; an unknown or ended one is nothing to do."""
        group = self._state.requests.get(request_id)
        if group is None:
            return []
        return end_all(self._state, group, FinishReason.ABORT)

    def finish(self, request_id: str, sample_index: int, num_output_tokens: int) -> list[TokenEvent]:
        """End one sequence whose stop string was completed by output token ``num_output_tokens`` (counted from 1).

        The tokens beyond are dropped. Nothing happens where the sequence has ended already.
        """
        group = self._state.requests.get(request_id)
        seq = next((s for s in group.sequences if s.sample_index == sample_index), None) if group else None
        if seq is None:
            return []
        num_tokens = seq.num_prompt + num_output_tokens
        assert num_tokens <= len(seq.token_ids), "a stop string cannot end in a token that was not sent"
        del seq.token_ids[num_tokens:]
        return [self._state.end(seq, FinishReason.STOP)]

    def abort_all(self) -> list[TokenEvent]:
        """Shutdown: end every sequence. Blocks in flight go when their steps are applied or failed."""
        return [event for request_id in tuple(self._state.requests) for event in self.abort(request_id)]

    def expire(self, now: float) -> list[TokenEvent]:
        """End the sequences whose deadlines have passed. Before each plan."""
        self._state.now = now
        return expire(self._state, now)

    def next_action(self, now: float) -> Step | Sleep | Wait:
        """Return what the engine's loop does next while it may submit a step."""
        plan = self.plan(now)
        if plan is not None:
            return Step(plan)
        state = self._state
        times_s = [state.deadlines.next_s] if state.sequences else []
        if state.waiting:
            times_s.append(
                state.gate.opens_at(state.config, len(state.running), state.waiting.oldest_arrival_s())
            )
        until_s = min((time_s for time_s in times_s if time_s is not None), default=None)
        return Wait() if until_s is None else Sleep(until_s)

    def plan(self, now: float) -> StepPlan | None:
        """Return the next step, or None where nothing can be computed now."""
        self._state.now = now
        if self._state.config.order == "deadline":
            demote(self._state, now)
        before = self._state.counters.num_computed_tokens
        plan = Planner(self._state, now).plan()
        stuck = plan is None and self._state.running and not self._state.in_flight
        if stuck and park_idle(self._state):
            plan = Planner(self._state, now).plan()
        if plan is not None:
            num_tokens = self._state.counters.num_computed_tokens - before
            self._state.in_flight[-1].num_tokens = num_tokens
            self._state.step_tokens.observe(num_tokens)
            held = self.cache.pool.num_blocks - self.cache.references.num_available
            if held > self._num_peak_blocks:
                self._num_peak_blocks = held
        return plan

    def apply(self, result: StepResult, now: float) -> list[TokenEvent]:
        """Apply the result of the oldest plan in flight."""
        return apply_result(self._state, result, now)

    def fail_in_flight(self, error: str, now: float) -> list[TokenEvent]:
        """Fail every step and transfer in flight: sequences of the steps end with ``error_kind`` "step"."""
        events = []
        while self._state.in_flight:
            events += self.apply(StepResult(self._state.in_flight[0].step, error=error), now)
        self.transfers.fail(error)
        return events

    def change_policy(self, change: PolicyChange) -> None:
        """Change settings from the next plan on; ConfigError where a value is not allowed."""
        change_policy(self._state, change)

    def expected_s(self) -> float:
        """Return how many seconds the steps in flight may well take; see `Predictor.expected_s`."""
        expected_s = self.predictor.expected_s
        return sum(expected_s(record.num_prompt_tokens) for record in self._state.in_flight)

    @property
    def has_work(self) -> bool:
        """Whether any sequence has not ended, or any step or transfer is in flight."""
        state = self._state
        return bool(state.sequences or state.in_flight or self.cache.references.transfers)

    def stats(self) -> EngineStats:
        """Return gauges and counters as of now."""
        state, prefix = self._state, self.cache.prefix
        num_groups = self.cache.windows.num_groups
        num_slots = sum(seq.table.num_blocks for seq in state.running) * self.cache.block_size
        num_unused = num_groups * sum(seq.table.capacity - seq.num_planned for seq in state.running)
        return replace(
            state.counters,
            order=state.config.order,
            num_running=len(state.running),
            num_waiting=len(state.waiting) + len(state.loading),
            num_in_flight=len(state.in_flight),
            num_blocks=self.cache.pool.num_blocks,
            num_free_blocks=self.cache.pool.num_free,
            num_cached_blocks=prefix.num_blocks,
            num_idle_blocks=prefix.num_idle,
            num_peak_blocks=self._num_peak_blocks,
            ttft=self.predictor.ttft_stats(
                sum(seq.told_first for seq in state.running),
                state.config.max_num_batched_tokens,
                long_threshold(state.config),
            ),
            num_unused_slots=num_unused,
            kv_fragmentation=num_unused / num_slots if num_slots else 0.0,
            num_steps=state.next_step,
            num_evicted_blocks=prefix.num_evicted,
            step_tokens=tuple(state.step_tokens.counts),
            accepted_at=tuple(
                state.accepted_at[: max(state.config.max_num_drafts, state.start_config.max_num_drafts)]
            ),
            num_chosen_drafts=0 if (control := state.draft_control) is None else control.limit(None),
            draft_gain=1.0 if control is None else control.predicted_gain,
            measured_draft_gain=state.draft_gain.measured,
        )


def audit(scheduler: Scheduler) -> int:
    """Put the books of the cache right, if nothing runs; return how many blocks were counted wrongly."""
    if scheduler.has_work:
        return 0
    num_blocks = reclaim(scheduler.cache)
    scheduler._state.counters.num_reclaimed_blocks += num_blocks
    return num_blocks


def describe(scheduler: Scheduler, plan: StepPlan) -> str:
    """Return in words what ``plan``, which is in flight, computes: a line, and one for each sequence."""
    lines = [
        f"step {plan.step}: {len(plan.seqs)} sequences, {len(plan.new_seqs)} of them new, "
        f"{len(plan.kv_moves)} block copies, {len(plan.adapter_moves)} adapters to load"
    ]
    for each in plan.seqs:
        seq = scheduler._state.sequences.get(each.seq_id)
        of = "ended" if seq is None else f"request {seq.request_id} sample {seq.sample_index}"
        first, end = each.num_computed_tokens, each.num_computed_tokens + each.num_scheduled_tokens
        drafts = f", {each.num_draft_tokens} of them drafts" if each.num_draft_tokens else ""
        lines.append(f"  sequence {each.seq_id} epoch {each.epoch} ({of}): tokens {first}…{end - 1}{drafts}")
    return "\n".join(lines)
