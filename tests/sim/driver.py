"""Drives real scheduler, cache and core with the fake executor through a scenario, checking after every step."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest.mock import patch

from tests.fakes.executor import FakeExecutor, FakeTransferRates
from tests.fakes.integrity import check_integrity
from tests.sim.scenario import RequestMaker, Scenario, expected_output

from quire.cache import prefix_cache
from quire.clock import VirtualClock
from quire.config import GATES, ORDERS
from quire.engine.core import EngineCore
from quire.engine.messages import (
    AbortRequest,
    FinishSample,
    LoadKv,
    ResetPrefixCache,
    Shutdown,
    StoreKv,
    TransfersDone,
)
from quire.metrics.engine_stats import EngineStats
from quire.request import FinishReason, Request, TokenEvent, TokenLogprobs
from quire.scheduler.scheduler import Scheduler, Sleep
from quire.scheduler.settings import PolicyChange
from quire.step import StepPlan, StepResult

STEP_S = 0.01
CLEARED_A_STEP = 3  # nodes, so that a small tree takes several steps to come apart
MAX_STEPS = 20_000  # the longest end (seed 5522, one token per step, 130 preemptions) comes after 7,300


@dataclass(slots=True)
class Sample:
    """What the frontend knows of one sample."""

    request: Request
    index: int
    expected: list[int]
    reason: str
    stop_at: int | None  # a stop string is completed by this output token
    token_ids: list[int] = field(default_factory=list)  # with those from before a restart
    ends: list[TokenEvent] = field(default_factory=list)
    finished_here: bool = False  # its stop string was seen: what comes after is ignored
    aborted: bool = False
    ended_s: float = 0.0


class Watched:
    """The executor, with a look at what passes."""

    def __init__(self, executor: FakeExecutor, seen: Counter[str]) -> None:
        self.max_in_flight, self.chains_steps = executor.max_in_flight, executor.chains_steps
        self._executor = executor
        self._seen = seen

    def submit(self, plan: StepPlan) -> None:
        self._seen["moves"] += len(plan.kv_moves)
        self._seen["state moves"] += len(plan.state_moves)
        self._seen["saves"] += sum(len(p.checkpoints) for p in plan.seqs)
        self._seen["adapter loads"] += len(plan.adapter_moves)
        self._seen["plans without seqs"] += not plan.seqs
        self._seen["mixed steps"] += len({p.num_scheduled_tokens > 1 for p in plan.seqs}) == 2
        self._seen["drafts"] += sum(p.num_draft_tokens for p in plan.seqs)
        self._seen["resumed"] += sum(bool(new.output_token_ids) for new in plan.new_seqs)
        self._executor.submit(plan)

    def collect(self) -> StepResult:
        return self._executor.collect()

    def close(self) -> None:
        self._executor.close()


class Driver:
    """One run of a scenario. ``seen`` counts what it exercised."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.seen: Counter[str] = Counter()
        self.rng = random.Random(f"driver-{scenario.seed}")
        self.clock = VirtualClock()
        self.executor = FakeExecutor(
            scenario.cache,
            max_in_flight=scenario.max_in_flight,
            chains_steps=scenario.chains_steps,
            model=scenario.model,
            faults=scenario.faults,
            drafts=scenario.drafts,
            transfers=FakeTransferRates(scenario.transfer_delay, scenario.transfer_failure, scenario.seed),
        )
        self.executor.transfers.on_done = lambda done: self.core.put(TransfersDone((done,)))
        self.transfer_rng = random.Random(f"transfers-{scenario.seed}")
        self.scheduler = Scheduler(scenario.scheduler, scenario.cache, chains_steps=scenario.chains_steps)
        self.core = EngineCore(self.scheduler, Watched(self.executor, self.seen), self.clock)
        self.samples: dict[str, list[Sample]] = defaultdict(list)
        self.scored: dict[str, dict[int, TokenLogprobs]] = defaultdict(dict)  # by place in the prompt
        self.maker = RequestMaker(scenario, self.rng)
        self._watch()

    def run(self) -> Counter[str]:
        """Run to the end and return what was seen. AssertionError where anything is wrong."""
        with patch.object(prefix_cache, "SLICE", CLEARED_A_STEP):
            return self._run()

    def _run(self) -> Counter[str]:
        num_left = self.scenario.num_requests
        shutdown_at = self.rng.randint(5, 100) if self.rng.random() < 0.1 else None
        idle, progress = 0, (0, 0)
        while num_left or self.core.has_work:
            for _ in range(min(num_left, self._arrivals())):
                self._arrive()
                num_left -= 1
            self._disturb()
            if shutdown_at is not None and self.seen["steps"] >= shutdown_at:
                self.core.put(Shutdown())
                num_left = 0
            self.executor.tick()
            events = self._die() if self.transfer_rng.random() < self.scenario.death_rate else []
            events += self.core.step()
            self.clock.advance(STEP_S)
            self._take(events)
            check_integrity(self.scheduler)
            assert not self.executor.violations, self.executor.violations[:3]
            self.seen["steps"] += 1
            self.seen["steps with cleared nodes"] += bool(self.scheduler.cache.prefix.cleared)
            assert self.seen["steps"] < MAX_STEPS, "no end"
            progress, before = (self.core.stats().num_steps, self.core.num_out), progress
            waits = progress == before and not events and not isinstance(self.core.rest, Sleep)
            waits = waits and not self.executor.transfers.num_open
            idle = idle + 1 if waits and self.core.has_work else 0
            assert idle < 2, f"stuck: {self.core.stats()}"
        self._check_end()
        return self.seen

    def _arrivals(self) -> int:
        rate = self.scenario.arrivals_per_step
        return int(rate) if rate >= 1 else int(self.rng.random() < rate)

    def _arrive(self) -> None:
        request = self.maker.make(self.clock.now())
        for index in range(request.sampling.n):
            expected, reason = expected_output(request, index, self.scenario)
            before = request.output_token_ids[index] if request.output_token_ids else ()
            stop_at = None
            if self.rng.random() < self.scenario.stop_string_rate and len(before) < len(expected):
                stop_at = self.rng.randint(len(before) + 1, len(expected))
            if index not in request.finished_samples:
                sample = Sample(request, index, expected, reason, stop_at, list(before))
                self.samples[request.request_id].append(sample)
        self.core.put(request)
        if self.transfer_rng.random() < self.scenario.load_rate:
            num_blocks = self.transfer_rng.choice((1, 2, 1000))
            num_there = self.transfer_rng.choice((0, 2, 1000, 1000))
            self.executor.transfers.prefill(self.scenario.cache.model_key, request, num_there)
            self.core.put(LoadKv(request.request_id, "remote", num_blocks))

    def _die(self) -> list[TokenEvent]:
        """The executor loses what is out, and the core hears of it."""
        self.seen["deaths"] += 1
        self.executor.die()
        return self.core.fail_in_flight("the executor died")

    def _disturb(self) -> None:
        """Aborts, also of requests long gone, and changes of policy."""
        if self.samples and self.rng.random() < self.scenario.abort_rate:
            request_id = self.rng.choice(sorted(self.samples))
            alive = [s for s in self.samples[request_id] if not s.ends]
            self.seen["aborts in flight"] += bool(alive and self.core.num_out)
            for sample in alive:
                sample.aborted = True
            self.core.put(AbortRequest(request_id))
        if self.rng.random() < self.scenario.policy_rate:
            start = self.scenario.scheduler
            change = PolicyChange(
                max_num_seqs=self.rng.choice((None, 1, min(4, start.max_num_seqs), start.max_num_seqs)),
                max_num_batched_tokens=self.rng.choice(
                    (None, min(2, start.max_num_batched_tokens), start.max_num_batched_tokens)
                ),
                gate=self.rng.choice((None, None, *GATES)),
                order=self.rng.choice((None, *ORDERS)),
            )
            self.seen["policy changes"] += 1
            self.core.put(change)
        hashes = self.scheduler.cache.prefix.nodes
        if (
            self.scheduler.state.sequences
            and hashes
            and self.transfer_rng.random() < self.scenario.store_rate
        ):
            index = self.transfer_rng.randrange(len(hashes))
            block_hash = next(itertools.islice(hashes, index, None))
            self.core.put(StoreKv(block_hash, "remote", self.transfer_rng.choice((1, 4))))
        if self.rng.random() < self.scenario.policy_rate:
            self.seen["cache resets in flight"] += self.core.num_out > 0
            self.core.put(ResetPrefixCache("reset"))

    def _take(self, events: list[TokenEvent]) -> None:
        """What the frontend does with events."""
        for event in events:
            sample = next(s for s in self.samples[event.request_id] if s.index == event.sample_index)
            assert not sample.ends, f"an event after the end: {event}"
            sample.token_ids.extend(event.token_ids)
            for place, entry in enumerate(event.prompt_logprobs or (), event.prompt_start):
                assert self.scored[event.request_id].setdefault(place, entry) == entry
            if event.finish_reason is not None:
                sample.ends.append(event)
                sample.ended_s = self.clock.now()
            num_tokens = len(sample.token_ids)
            if sample.stop_at is not None and num_tokens >= sample.stop_at and not sample.finished_here:
                sample.finished_here = True
                self.core.put(FinishSample(event.request_id, event.sample_index, sample.stop_at))

    def _check_end(self) -> None:
        for samples in self.samples.values():
            for sample in samples:
                self._check_sample(sample)
        stats = self.core.stats()
        assert stats.num_running == stats.num_waiting == stats.num_in_flight == 0
        assert stats.num_free_blocks + stats.num_idle_blocks == stats.num_blocks, "blocks leaked"
        assert self.executor.seq_ids <= set(self.scheduler.state.gone), "worker state leaked"
        self.scheduler.cache.prefix.clear()
        while self.scheduler.cache.prefix.take_apart():
            pass
        assert self.scheduler.cache.pool.num_free == stats.num_blocks
        for name in ("preemptions", "forks", "zombie_results", "failed_steps", "restarted_readers", "chunks"):
            self.seen[name] += getattr(stats, f"num_{name}")
        self._check_costs(stats)
        self.seen["accepted drafts"] += self.executor.num_accepted
        self.seen["rejected drafts"] += self.executor.num_rejected
        self.seen.update(self.executor.transfers.seen)
        for name in ("loaded_blocks", "stored_blocks", "failed_transfers"):
            self.seen[name] += getattr(stats, f"num_{name}")
        states = self.scheduler.cache.states
        if states is not None:
            states.sweep()
            assert len(states.free) == states.num_slots, "state slots leaked"
        for name in ("checkpoint_loads", "checkpoint_saves", "evicted_checkpoints"):
            self.seen[name] += getattr(stats, f"num_{name}")
        for name in ("cached_tokens", "prompt_tokens", "evicted_blocks", "generated_tokens"):
            self.seen[name] += getattr(stats, f"num_{name}")

    def _check_costs(self, stats: EngineStats) -> None:
        """What the sequences were charged, and what was nobody's, is the time in which steps were computed."""
        ends = [end.timing for samples in self.samples.values() for sample in samples for end in sample.ends]
        charged_s = sum(timing.engine_s for timing in ends if timing is not None)
        assert math.isclose(charged_s + stats.unshared_s, stats.busy_s, abs_tol=1e-6)
        block_s = sum(timing.kv_block_s for timing in ends if timing is not None)
        assert math.isclose(block_s, stats.kv_block_s, abs_tol=1e-6)
        self.seen["busy steps"] += stats.busy_s > 0
        self.seen["unshared time"] += stats.unshared_s > 0

    def _check_sample(self, sample: Sample) -> None:
        assert len(sample.ends) == 1, f"{len(sample.ends)} terminal events: {sample}"
        end = sample.ends[0]
        reason = end.finish_reason
        got, expected = sample.token_ids, sample.expected
        assert got == expected[: len(got)], f"{got} is not a prefix of {expected}: {sample.request}"
        self.seen[f"end {reason}"] += 1
        deadline = sample.request.terms.deadline
        if deadline is not None and deadline.total_s is not None:
            slack_s = (self.scenario.max_in_flight + 1.5) * STEP_S
            assert sample.ended_s <= sample.request.arrival_s + deadline.total_s + slack_s
        if reason is FinishReason.ERROR:
            self.seen[f"error {end.error_kind}"] += 1
            if end.error_kind == "step":
                faults = self.scenario.faults
                assert (
                    faults.step_error
                    or faults.collect_raises
                    or faults.submit_raises
                    or faults.seq_error
                    or self.seen["deaths"]
                )
            if end.error_kind == "hopeless":
                assert sample.request.terms.deadline is not None
                assert not sample.request.output_token_ids
                assert end.retry_after_s > 0
        elif reason is FinishReason.ABORT:
            pass
        elif reason is FinishReason.DEADLINE:
            self._check_late(sample)
        elif sample.finished_here and (got != expected or reason is FinishReason.STOP):
            self.seen["stop strings"] += 1
        else:
            assert got == expected
            assert reason == sample.reason
            self._check_scores(sample.request)
            self.seen["beams"] += sample.request.sampling.use_beam_search
            assert end.stop_token_id == (got[-1] if reason is FinishReason.STOP else None)

    def _check_scores(self, request: Request) -> None:
        """Every token of the prompt but the first has its own, where they were asked for and not told before."""
        if request.sampling.prompt_logprobs is None or any(request.output_token_ids):
            return
        assert sorted(self.scored[request.request_id]) == list(range(1, len(request.prompt_token_ids)))
        self.seen["scored prompts"] += 1

    def _check_late(self, sample: Sample) -> None:
        """It has a deadline, and it was ended at the first step after it, not before it."""
        deadline, end = sample.request.terms.deadline, sample.ends[0]
        assert deadline is not None
        assert end.error_kind == "deadline"
        which = "total" if "deadline_ms.total" in (end.error or "") else "first_token"
        limit_s = deadline.total_s if which == "total" else deadline.first_token_s
        assert limit_s is not None
        late_s = sample.ended_s - sample.request.arrival_s - limit_s
        assert -STEP_S / 2 <= late_s <= (self.scenario.max_in_flight + 1.5) * STEP_S, late_s
        assert which == "total" or len(sample.token_ids) == len(self._before(sample))
        self.seen[f"late {which}"] += 1

    def _before(self, sample: Sample) -> tuple[int, ...]:
        outputs = sample.request.output_token_ids
        return outputs[sample.index] if outputs else ()

    def _watch(self) -> None:
        """Count what no statistic shows."""
        cache = self.scheduler.cache
        watched = [
            (cache.publisher, "_merge"),
            (cache.prefix, "_strip"),
            (cache.prefix, "fill"),
            (cache, "slide"),
        ]
        adapters = self.scheduler.state.policies.adapters.slots
        adapters.oldest_in_use = self._counted("adapter waits", adapters.oldest_in_use)  # type: ignore[method-assign]
        for owner, name in watched:
            setattr(owner, name, self._counted(name.strip("_"), getattr(owner, name)))

    def _counted(self, name: str, method: Callable[..., object]) -> Callable[..., object]:
        def counted(*args: object) -> object:
            self.seen[name] += 1
            return method(*args)

        return counted
