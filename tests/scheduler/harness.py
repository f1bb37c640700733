"""A scheduler driven by hand: plans are looked at, results are made up or come from the fake executor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from tests.fakes.executor import FakeDrafts, FakeExecutor, FakeFaults
from tests.fakes.integrity import check_integrity
from tests.fakes.model import FakeModel, fake_tokens

from quire.clock import VirtualClock
from quire.config import CacheConfig, SchedulerConfig
from quire.engine.core import EngineCore
from quire.request import KvTerms, Request, SamplingParams, Terms, TokenEvent
from quire.scheduler.scheduler import Scheduler
from quire.step import SeqResult, StepPlan, StepResult

MODEL = FakeModel(vocab_size=500, eos_probability=0.0)


def request(
    name: str,
    prompt: int | Sequence[int] = 8,
    *,
    arrival_s: float = 0.0,
    priority: int = 0,
    salt: str = "",
    kv: KvTerms | None = None,
    outputs: tuple[tuple[int, ...], ...] = (),
    finished: tuple[int, ...] = (),
    **sampling: object,
) -> Request:
    """A request; a number as prompt is that many tokens of its own."""
    if isinstance(prompt, int):
        start = 1000 * (1 + sum(map(ord, name)))
        prompt = range(start, start + prompt)
    params = SamplingParams(**{"max_tokens": 4, "seed": 0, **sampling})  # type: ignore[arg-type]
    return Request(
        name,
        tuple(prompt),
        params,
        arrival_s,
        Terms(priority=priority, cache_salt=salt, kv=kv),
        output_token_ids=outputs,
        finished_samples=finished,
    )


def make_scheduler(
    num_blocks: int = 64,
    block_size: int = 4,
    windows: tuple[int | None, ...] = (None,),
    *,
    caching: bool = True,
    num_states: int = 0,
    num_checkpoints: int = 0,
    **config: object,
) -> Scheduler:
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 64}
    cache = CacheConfig(
        num_blocks,
        block_size,
        windows,
        enable_prefix_caching=caching,
        num_states=num_states,
        num_checkpoints=num_checkpoints,
        state_bytes=4_000 if num_states else 0,
    )
    return Scheduler(SchedulerConfig(**{**defaults, **config}), cache)  # type: ignore[arg-type]


def answer(scheduler: Scheduler, plan: StepPlan, token_id: int = 5) -> StepResult:
    """Return a result that gives ``token_id`` to every sequence whose last known token the plan computes."""
    sequences = scheduler.state.sequences.values()
    known = {seq.seq_id: seq.num_total for seq in sequences if seq.num_total > len(seq.token_ids)}
    results = []
    for p in plan.seqs:
        # A planned last row has raised num_total by one already.
        samples = p.num_computed_tokens + p.num_scheduled_tokens == known.get(p.seq_id, 0) - 1
        results.append(SeqResult(p.seq_id, p.epoch, (token_id,) if samples else ()))
    return StepResult(plan.step, tuple(results))


def step(scheduler: Scheduler, now: float = 0.0, token_id: int = 5) -> list[TokenEvent]:
    """Plan one step and apply made-up tokens."""
    plan = scheduler.plan(now)
    if plan is None:
        return []
    events = scheduler.apply(answer(scheduler, plan, token_id), now)
    check_integrity(scheduler)
    return events


def rows_of(plan: StepPlan | None) -> dict[int, int]:
    """Rows by sequence id."""
    return {p.seq_id: p.num_scheduled_tokens for p in plan.seqs} if plan is not None else {}


class Engine:
    """Scheduler, core and fake executor; keeps the events by sample."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        in_flight: int = 1,
        faults: FakeFaults | None = None,
        model: FakeModel = MODEL,
        drafts: FakeDrafts | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.clock = VirtualClock()
        self.executor = FakeExecutor(
            scheduler.cache.config, max_in_flight=in_flight, model=model, faults=faults, drafts=drafts
        )
        self.core = EngineCore(scheduler, self.executor, self.clock)
        self.events: dict[tuple[str, int], list[TokenEvent]] = defaultdict(list)

    def put(self, requests: Iterable[Request]) -> None:
        for one in requests:
            self.core.put(one)

    def step(self) -> list[TokenEvent]:
        events = self.core.step()
        self.clock.advance(0.01)
        for event in events:
            self.events[event.request_id, event.sample_index].append(event)
        check_integrity(self.scheduler)
        assert self.executor.violations == []
        return events

    def run(self, limit: int = 500) -> None:
        for _ in range(limit):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError(f"still at work after {limit} steps: {self.core.stats()}")

    def tokens(self, name: str, index: int = 0) -> list[int]:
        return [token for event in self.events[name, index] for token in event.token_ids]

    def end(self, name: str, index: int = 0) -> TokenEvent:
        ends = [event for event in self.events[name, index] if event.finish_reason is not None]
        assert len(ends) == 1
        assert self.events[name, index][-1] is ends[0]
        return ends[0]


def oracle(one: Request, index: int = 0, model: FakeModel = MODEL) -> list[int]:
    assert one.sampling.max_tokens is not None
    return fake_tokens(one.prompt_token_ids, one.sampling, index, one.sampling.max_tokens, model)
