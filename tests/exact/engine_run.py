"""One run of the real core, scheduler, cache and local executor over random traffic, watched from outside."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tests.exact.models import MAX_MODEL_LEN, head_spec, llama
from tests.exact.traffic import STEP_S, Job
from tests.fakes.integrity import check_integrity
from tests.kernels.checks import runner_config

from quire.clock import VirtualClock
from quire.config import (
    CacheConfig,
    DeviceInfo,
    EngineConfig,
    GateKind,
    HeadsConfig,
    ModelConfig,
    OrderKind,
    SchedulerConfig,
    SpeculateConfig,
)
from quire.engine.core import EngineCore
from quire.engine.messages import AbortRequest
from quire.executor.base import Executor
from quire.executor.moving import MovingExecutor
from quire.modelspec import ModelSpec
from quire.request import FinishReason, TokenEvent
from quire.scheduler.scheduler import Scheduler
from quire.step import StepPlan, StepResult
from quire.weight_format import WeightFormat

Drafting = Literal[
    "none", "ngram", "lookahead", "self", "other", "oracle", "medusa", "eagle", "eagle3", "mtp"
]


@dataclass(frozen=True, slots=True)
class Policy:
    """gate × order × budget, and who drafts: no proposer, prompt lookup, the model itself in its own type, in another
    type, a proposer that knows the output and errs at times, or random heads. Drafts are trees, but for those of the
    model itself.
    """

    gate: GateKind
    order: OrderKind
    budget: int
    drafts: Drafting = "none"


@dataclass(slots=True)
class Tally:
    """What the runs exercised; runs add up."""

    policies: set[Policy] = field(default_factory=set)
    num_steps: int = 0
    num_draws: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_chunked_prompts: int = 0
    num_preemptions: int = 0
    num_forks: int = 0
    num_aborts: int = 0
    num_failures: int = 0
    num_moves: int = 0
    num_adapter_loads: int = 0
    num_accepted: int = 0  # drafts
    num_rejected: int = 0
    max_step_seqs: int = 0  # the most sequences that one step computed
    num_full_steps: int = 0  # steps that computed as many
    num_loaded: int = 0  # blocks, from a tier
    num_stored: int = 0

    def __iadd__(self, other: Tally) -> Tally:
        for name in self.__slots__:
            if name == "policies":
                self.policies |= other.policies
            elif name == "max_step_seqs":
                self.max_step_seqs = max(self.max_step_seqs, other.max_step_seqs)
            else:
                setattr(self, name, getattr(self, name) + getattr(other, name))
        return self

    def __str__(self) -> str:
        cached = self.num_cached_tokens / max(1, self.num_prompt_tokens)
        return (
            f"{len(self.policies)} policies, {self.num_steps} steps, {self.num_draws} draws, "
            f"{self.num_preemptions} preemptions, "
            f"{cached:.0%} of {self.num_prompt_tokens} prompt tokens from the cache, "
            f"{self.num_chunked_prompts} prompts in chunks, {self.num_forks} forks, {self.num_moves} block copies, "
            f"{self.num_aborts} aborts, {self.num_accepted} drafts accepted and {self.num_rejected} rejected"
        )


@dataclass(slots=True)
class Ended:
    """What the client of one sequence got."""

    token_ids: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    error: str | None = None


def _slots(spec: ModelSpec, max_num_seqs: int) -> dict[str, int]:
    """Return the slots of recurrent states: of all running sequences, and a few for checkpoints, which are evicted."""
    if not spec.state_layers:
        return {}
    return {
        "num_states": max_num_seqs,
        "num_checkpoints": 12,
        "num_draft_states": 12,
        "state_bytes": spec.state_bytes_per_sequence,
    }


def engine_config(
    spec: ModelSpec,
    dtype: str,
    *,
    path: str = "",
    num_blocks: int,
    block_size: int,
    policy: Policy,
    max_num_seqs: int = 16,
    num_threads: int = 1,
    cpu_isa: str = "reference",
    kv_dtype: str | None = None,
    max_model_len: int = MAX_MODEL_LEN,
    formats: dict[str, WeightFormat] | None = None,
) -> EngineConfig:
    """A configuration by hand: `resolve` has no say in how small a pool may be."""
    layout = spec.kv_layout(max_model_len)
    windows = tuple(group.window for group in layout.groups)
    model = ModelConfig(
        path,
        "tiny",
        spec,
        dtype,
        kv_dtype or dtype,
        max_model_len,
        "auto" if path else "random",
        seed=1,
        formats=formats or {},
    )
    speculate = None
    if policy.drafts in ("self", "other"):
        other = {"float32": "bfloat16", "bfloat16": "float32"}[dtype]
        own = other if policy.drafts == "other" else dtype
        drafting = llama() if spec.state_layers else spec
        speculate = SpeculateConfig("draft", replace(model, spec=drafting, dtype=own, kv_dtype=own))
    elif policy.drafts in ("medusa", "eagle", "eagle3", "mtp"):
        heads = HeadsConfig("", "tiny", head_spec(spec, policy.drafts), dtype, "random", seed=2)
        method = policy.drafts.removesuffix("3")
        speculate = SpeculateConfig(method, heads=heads)  # type: ignore[arg-type]
    elif policy.drafts != "none":
        speculate = SpeculateConfig("lookahead" if policy.drafts == "lookahead" else "ngram")
    is_chain = policy.drafts in ("none", "self") or bool(spec.state_layers)
    paths = 1 if is_chain else 5 if policy.drafts == "lookahead" else 3
    if speculate is not None:
        speculate = replace(speculate, num_branch_blocks=8 * (paths - 1) * len(windows))
    return EngineConfig(
        model=model,
        kv_layout=layout,
        cache=CacheConfig(num_blocks, block_size, windows, **_slots(spec, max_num_seqs)),
        scheduler=SchedulerConfig(
            gate=policy.gate,
            order=policy.order,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=policy.budget,
            max_model_len=max_model_len,
            dynamic_max_wait_s=3 * STEP_S,
            max_num_drafts=0 if policy.drafts == "none" else 12 if policy.drafts == "lookahead" else 4,
            max_draft_paths=paths,
        ),
        runner=runner_config(cpu_isa, num_threads),
        device=DeviceInfo("cpu", "test", 1, 2**30, 2**30),
        speculate=speculate,
    )


INJECTED = "injected"


class WatchedExecutor:
    """An executor, with a look at the plans that pass; every ``fail_every``-th of them fails (one in flight only)."""

    def __init__(self, executor: Executor, tally: Tally, fail_every: int | None) -> None:
        self.max_in_flight, self.chains_steps = executor.max_in_flight, executor.chains_steps
        self._fail_every = fail_every
        assert fail_every is None or executor.max_in_flight == 1
        self._pending: StepPlan | None = None
        self._executor = executor
        self._tally = tally
        self._prompt_lens: dict[int, int] = {}  # by sequence
        self._chunked: set[int] = set()

    def submit(self, plan: StepPlan) -> None:
        self._tally.num_steps += 1
        if len(plan.seqs) > self._tally.max_step_seqs:
            self._tally.max_step_seqs, self._tally.num_full_steps = len(plan.seqs), 0
        self._tally.num_full_steps += len(plan.seqs) == self._tally.max_step_seqs
        self._tally.num_moves += len(plan.kv_moves)
        self._tally.num_adapter_loads += len(plan.adapter_moves)
        for new in plan.new_seqs:
            self._prompt_lens[new.seq_id] = len(new.prompt_token_ids)
        for seq in plan.seqs:
            end = seq.num_computed_tokens + seq.num_scheduled_tokens
            # The last prompt token of a request with n > 1 is computed by itself; that alone is no chunk.
            if end < self._prompt_lens[seq.seq_id] - 1 and seq.seq_id not in self._chunked:
                self._chunked.add(seq.seq_id)
                self._tally.num_chunked_prompts += 1
        self._pending = plan
        if self._fail_every is None:
            self._executor.submit(plan)

    def collect(self) -> StepResult:
        if self._fail_every is None:
            result = self._executor.collect()
            assert result.error is None, result.error
            if self._executor.max_in_flight == 1:
                self._count_drafts(result)
            return result
        turn, rest = divmod(self._tally.num_steps, self._fail_every)
        plan = self._pending
        assert plan is not None
        if rest == 0 and turn % 2 == 0:
            return StepResult(plan.step, error=INJECTED)  # the worker never heard of it
        self._executor.submit(plan)
        result = self._executor.collect()
        assert result.error is None, result.error
        return StepResult(result.step, error=INJECTED) if rest == 0 else result

    def _count_drafts(self, result: StepResult) -> None:
        assert self._pending is not None
        for plan, seq in zip(self._pending.seqs, result.seqs, strict=True):
            if plan.num_draft_tokens:
                self._tally.num_accepted += len(seq.token_ids) - 1
                self._tally.num_rejected += 1 + plan.num_draft_tokens - len(seq.token_ids)

    def close(self) -> None:
        self._executor.close()


class EngineRun:
    """Serves ``jobs`` to their end on a virtual clock: one step takes `STEP_S`."""

    def __init__(
        self, config: EngineConfig, executor: Executor, policy: Policy, fail_every: int | None = None,
        mover: Any = None,
    ) -> None:  # fmt: skip
        """``mover``: moves blocks from and to a tier (`quire.executor.moving`); None: there is none."""
        self.tally = Tally(policies={policy})
        self.ended: dict[tuple[str, int], Ended] = {}
        self.num_computed_tokens = 0
        self._clock = VirtualClock()
        self._scheduler = Scheduler(
            config.scheduler, config.cache, chains_steps=executor.chains_steps, num_stages=config.topology.pp
        )
        watched: Executor = WatchedExecutor(executor, self.tally, fail_every)
        if mover is not None:
            watched = MovingExecutor(watched, mover)
            self._scheduler.state.policies.turn_on("tiers").connect(mover)
        self._core = EngineCore(self._scheduler, watched, self._clock)

    def serve(self, jobs: Iterable[Job]) -> None:
        arrivals = sorted(jobs, key=lambda job: job.request.arrival_s, reverse=True)
        aborts: list[tuple[float, str]] = []
        for job in arrivals:
            for index in range(job.request.sampling.n):
                self.ended[job.request.request_id, index] = Ended()
            self.tally.num_prompt_tokens += len(job.request.prompt_token_ids)
            if job.abort_after_steps is not None:
                when_s = job.request.arrival_s + job.abort_after_steps * STEP_S
                aborts.append((when_s, job.request.request_id))
        aborts.sort(reverse=True)
        while arrivals or aborts or self._core.has_work:
            now_s = self._clock.now()
            while arrivals and arrivals[-1].request.arrival_s <= now_s:
                self._core.put(arrivals.pop().request)
            while aborts and aborts[-1][0] <= now_s:
                self._core.put(AbortRequest(aborts.pop()[1]))
            self._take(self._core.step())
            check_integrity(self._scheduler)
            self._clock.advance(STEP_S)
        stats = self._core.stats()
        self.tally.num_cached_tokens += stats.num_cached_tokens
        self.tally.num_preemptions += stats.num_preemptions
        self.tally.num_forks += stats.num_forks
        self.tally.num_loaded += stats.num_loaded_blocks
        self.tally.num_stored += stats.num_stored_blocks
        self.num_computed_tokens = stats.num_computed_tokens
        assert stats.num_free_blocks + stats.num_idle_blocks == stats.num_blocks, "blocks leaked"

    def _take(self, events: Iterable[TokenEvent]) -> None:
        for event in events:
            ended = self.ended[event.request_id, event.sample_index]
            assert ended.reason is None, "an event after the terminal one"
            ended.token_ids += event.token_ids
            ended.error = event.error
            ended.reason = event.finish_reason
            self.tally.num_aborts += event.finish_reason is FinishReason.ABORT
            self.tally.num_failures += event.finish_reason is FinishReason.ERROR
