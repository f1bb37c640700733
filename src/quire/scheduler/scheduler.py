"""`Scheduler`: requests in, plans out, results in, events out. A function of its inputs and of ``now``; no clock.

    add / abort / finish / abort_all        → TokenEvents (refusals and other ends)
    transfers.load / store / end            blocks from or to another tier or peer
    next_action(now)                        → Step(plan) | Sleep(until_s) | Wait()
    apply(result, now)                      → TokenEvents
    fail_in_flight(error)                   → TokenEvents: what is in flight will never come back

Every sequence ends with exactly one terminal event, whatever happens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.cache.events import EventBuffer
from quire.cache.manager import CacheManager, reclaim
from quire.config import CacheConfig, SchedulerConfig
from quire.metrics.engine_stats import STEP_TOKENS, EngineStats, Histogram
from quire.request import FinishReason, Request, TokenEvent
from quire.scheduler.admission import Admission
from quire.scheduler.outcome import Outcome
from quire.scheduler.planner import Planner
from quire.scheduler.policies import NAMES, STAY, load, modelled_predictor, wanted_by_config
from quire.scheduler.policy import Policies, Policy
from quire.scheduler.predictor import Predictor
from quire.scheduler.settings import PolicyChange, changed
from quire.scheduler.state import SchedulerState
from quire.step import StepPlan, StepResult

if TYPE_CHECKING:
    from quire.cost.cost_model import StepTime
    from quire.scheduler.policies.stages import StageRows


class Step(NamedTuple):
    """Submit ``plan``."""

    plan: StepPlan


class Sleep(NamedTuple):
    """Nothing can be computed before ``until_s``, unless a message or a result arrives."""

    until_s: float


class Wait(NamedTuple):
    """Nothing can be computed before a message or a result arrives."""


class Scheduler:
    """Order of arrival, as many seats and tokens as the settings allow, and what the policies change of it."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache_config: CacheConfig,
        events: EventBuffer | None = None,
        *,
        chains_steps: bool = True,
        num_stages: int = 1,
        stage_rows: StageRows | None = None,
        step_time: StepTime | None = None,
    ) -> None:
        """``chains_steps``: the executor's; ``num_stages``: of its pipeline; ``step_time``: a model of its steps.

        ``stage_rows``: of a pipeline, see `policies.stages.stage_rows`.
        """
        self.cache = CacheManager(cache_config, events)
        self.cache_events = events  # for a gateway to drain; None: off
        state = self.state = SchedulerState(
            config, config, self.cache, Predictor(), chains_steps=chains_steps, num_stages=num_stages
        )
        state.policies = Policies(NAMES, STAY, partial(load, state=state))
        state.policies.follow(wanted_by_config(config, config))
        if num_stages > 1:
            stages = state.policies.turn_on("stages")
            stages.rows = stage_rows or stages.rows
        if cache_config.num_states:
            state.policies.turn_on("states")
        if step_time is not None:
            self.use_step_time(step_time)
        self._admission, self._outcome = Admission(state), Outcome(state)
        self._step_tokens = Histogram(STEP_TOKENS)
        self._num_peak_blocks = 0

    def use_step_time(self, step_time: StepTime) -> None:
        """Predict by a model of step times from now on, before the first step."""
        self.state.predictor = modelled_predictor(self.state.config, step_time)
        self.state.policies.turn_on("forecast")

    def add_policy(self, name: str, make: Callable[[SchedulerState], Policy]) -> None:
        """Turn on a policy that is not in the list of `quire.scheduler.policies`; it is asked last."""
        self.state.policies.add(name, make(self.state))

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the policies that are on, in the order in which they are asked."""
        return self.state.policies.names

    @property
    def predictor(self) -> Predictor:
        """How long steps take, as measured."""
        return self.state.predictor

    @property
    def config(self) -> SchedulerConfig:
        """The settings in force; `change_policy` replaces them."""
        return self.state.config

    def add(self, request: Request, now: float) -> list[TokenEvent]:
        """Queue a request. Refusals are its terminal events: ``error_kind`` "capacity" or "never_fits"."""
        self.state.now = now
        return self._admission.add(request, now)

    def abort(self, request_id: str) -> list[TokenEvent]:
        """End every sequence of a request; an unknown or ended one is nothing to do."""
        group = self.state.requests.get(request_id)
        if group is None:
            return []
        return self.state.end_all(group, FinishReason.ABORT)

    def finish(self, request_id: str, sample_index: int, num_output_tokens: int) -> list[TokenEvent]:
        """End one sequence whose stop string was completed by output token ``num_output_tokens`` (counted from 1).

        The tokens beyond are dropped. Nothing happens where the sequence has ended already.
        """
        group = self.state.requests.get(request_id)
        seq = next((s for s in group.sequences if s.sample_index == sample_index), None) if group else None
        if seq is None:
            return []
        num_tokens = seq.num_prompt + num_output_tokens
        assert num_tokens <= len(seq.token_ids), "a stop string cannot end in a token that was not sent"
        del seq.token_ids[num_tokens:]
        return [self.state.end(seq, FinishReason.STOP)]

    def abort_all(self) -> list[TokenEvent]:
        """Shutdown: end every sequence. Blocks in flight go when their steps are applied or failed."""
        return [event for request_id in tuple(self.state.requests) for event in self.abort(request_id)]

    def expire(self, now: float) -> list[TokenEvent]:
        """End the sequences whose deadlines have passed. Before each plan."""
        self.state.now = now
        events: list[TokenEvent] = []
        for expire in self.state.policies.expire:
            events += expire(now)
        return events

    def next_action(self, now: float) -> Step | Sleep | Wait:
        """Return what the engine's loop does next while it may submit a step."""
        plan = self.plan(now)
        if plan is not None:
            return Step(plan)
        state = self.state
        until_s = math.inf
        for wakes_at in state.policies.wakes_at:
            time_s = wakes_at()
            until_s = until_s if time_s is None else min(until_s, time_s)
        return Wait() if until_s == math.inf else Sleep(until_s)

    def plan(self, now: float) -> StepPlan | None:
        """Return the next step, or None where nothing can be computed now."""
        state = self.state
        state.now = now
        for before_plan in state.policies.before_plan:
            before_plan(now)
        before = state.counters.num_computed_tokens
        plan = Planner(state, now).plan()
        if plan is None:
            beams = state.policies.beams
            if beams is None or not state.running or state.in_flight or not beams.park_idle():
                return None
            plan = Planner(state, now).plan()  # beams waited for others of their depth
            if plan is None:
                return None
        num_tokens = state.counters.num_computed_tokens - before
        state.in_flight[-1].num_tokens = num_tokens
        self._step_tokens.observe(num_tokens)
        num_held = self.cache.pool.num_blocks - self.cache.references.num_available
        if num_held > self._num_peak_blocks:
            self._num_peak_blocks = num_held
        return plan

    def apply(self, result: StepResult, now: float) -> list[TokenEvent]:
        """Apply the result of the oldest plan in flight."""
        return self._outcome.apply(result, now)

    def fail_in_flight(self, error: str, now: float) -> list[TokenEvent]:
        """Fail every step and transfer in flight: sequences of the steps end with ``error_kind`` "step"."""
        events = []
        while self.state.in_flight:
            events += self.apply(StepResult(self.state.in_flight[0].step, error=error), now)
        if self.state.policies.transfers is not None:
            self.transfers.fail(error)
        return events

    @property
    def transfers(self) -> Any:
        """Blocks from or to another tier or peer; see `policies.transfers`."""
        return self.state.policies.turn_on("transfers")

    def change_policy(self, change: PolicyChange) -> None:
        """Change settings from the next plan on; ConfigError where a value is not allowed."""
        state = self.state
        before, state.config = state.config, changed(state.config, change, state.start_config)
        state.policies.follow(wanted_by_config(state.config, state.start_config))
        for configure in state.policies.configure:
            configure(state.config)
        if state.config.order != before.order:
            state.rank(state.sequences.values())
            state.waiting.reorder()

    def expected_s(self) -> float:
        """Return how many seconds the steps in flight may well take; see `Predictor.expected_s`."""
        expected_s = self.predictor.expected_s
        return sum(expected_s(record.num_prompt_tokens) for record in self.state.in_flight)

    @property
    def has_work(self) -> bool:
        """Whether any sequence has not ended, or any step or transfer is in flight."""
        state = self.state
        return bool(state.sequences or state.in_flight or self.cache.references.transfers)

    def stats(self) -> EngineStats:
        """Return gauges and counters as of now."""
        state, config, prefix = self.state, self.state.config, self.cache.prefix
        drafts, transfers, states = state.policies.drafts, state.policies.transfers, state.policies.states
        num_loading = 0 if transfers is None else len(transfers.loading)
        num_held = num_unused = num_decoding = 0
        for seq in state.running:
            num_held += seq.table.num_blocks
            num_unused += seq.table.capacity - seq.num_planned
            num_decoding += seq.told_first
        num_slots, num_unused = num_held * self.cache.block_size, num_unused * self.cache.windows.num_groups
        return replace(
            state.counters,
            order=config.order,
            num_running=len(state.running),
            num_waiting=len(state.waiting) + num_loading,
            num_in_flight=len(state.in_flight),
            num_blocks=self.cache.pool.num_blocks,
            num_free_blocks=self.cache.pool.num_free,
            num_cached_blocks=prefix.num_blocks,
            num_idle_blocks=prefix.num_idle,
            num_peak_blocks=self._num_peak_blocks,
            ttft=self.predictor.ttft_stats(
                num_decoding,
                config.max_num_batched_tokens,
                config.long_prefill_token_threshold if config.enable_chunked_prefill else 0,
            ),
            num_unused_slots=num_unused,
            kv_fragmentation=num_unused / num_slots if num_slots else 0.0,
            num_steps=state.next_step,
            num_evicted_blocks=prefix.num_evicted,
            step_tokens=tuple(self._step_tokens.counts),
            **({} if drafts is None else drafts.stats()),
            **({} if states is None else states.stats()),
        )


def audit(scheduler: Scheduler) -> int:
    """Put the books of the cache right, if nothing runs; return how many blocks were counted wrongly."""
    if scheduler.has_work:
        return 0
    num_blocks = reclaim(scheduler.cache)
    scheduler.state.counters.num_reclaimed_blocks += num_blocks
    return num_blocks


def describe(scheduler: Scheduler, plan: StepPlan) -> str:
    """Return in words what ``plan``, which is in flight, computes: a line, and one for each sequence."""
    lines = [
        f"step {plan.step}: {len(plan.seqs)} sequences, {len(plan.new_seqs)} of them new, "
        f"{len(plan.kv_moves)} block copies, {len(plan.adapter_moves)} adapters to load"
    ]
    for part in plan.seqs:
        seq = scheduler.state.sequences.get(part.seq_id)
        owner = "ended" if seq is None else f"request {seq.request_id} sample {seq.sample_index}"
        first, end = part.num_computed_tokens, part.num_computed_tokens + part.num_scheduled_tokens
        drafts = f", {part.num_draft_tokens} of them drafts" if part.num_draft_tokens else ""
        lines.append(
            f"  sequence {part.seq_id} epoch {part.epoch} ({owner}): tokens {first}…{end - 1}{drafts}"
        )
    return "\n".join(lines)
