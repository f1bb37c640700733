"""A fuzz scenario: everything that is random in a run, drawn from one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from tests.fakes.executor import FakeDrafts, FakeFaults
from tests.fakes.model import FakeModel, fake_tokens
from tests.scheduler.plain_search import plain_search

from quire.config import GATES, ORDERS, CacheConfig, SchedulerConfig
from quire.request import Adapter, Deadline, Request, SamplingParams, Terms

ADAPTERS = tuple(Adapter(name, f"/adapters/{name}", f"key of {name}", 8) for name in "abcde")
EOS = 7
STOP = 11
WINDOWS: tuple[tuple[int | None, ...], ...] = (
    (None,),
    (None,),
    (None, 8),
    (None, 5, 12),
    (None, None, 9),
    (None, 1),
    (10,),
    (3, 17),
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """The settings of one run."""

    seed: int
    scheduler: SchedulerConfig
    cache: CacheConfig
    model: FakeModel
    faults: FakeFaults
    max_in_flight: int
    num_requests: int
    arrivals_per_step: float
    abort_rate: float  # per step
    stop_string_rate: float  # share of the samples that end by a stop string
    policy_rate: float  # per step
    num_prefixes: int  # that prompts share
    repeat_rate: float  # share of the prompts that equal the one before
    deadline_rate: float = 0.0  # share of the requests that have one
    adapter_rate: float = 0.1  # share of the requests with a LoRA adapter
    drafts: FakeDrafts = FakeDrafts()  # noqa: RUF009
    chains_steps: bool = True
    load_rate: float = 0.0  # share of the requests that wait for a load
    store_rate: float = 0.0  # per step
    transfer_delay: int = 0  # steps per block at most
    transfer_failure: float = 0.0  # per block
    death_rate: float = 0.0  # per step: the executor loses what is out


def widened(scenario: Scenario) -> Scenario:
    """The same with drafts, or with transfers, or with both; every third executor does not chain its steps."""
    rng = random.Random(f"waist-{scenario.seed}")
    kind, most = scenario.seed % 3, rng.choice((1, 2, 5))
    wide = replace(scenario, chains_steps=scenario.seed // 3 % 3 != 0)
    if kind != 1:
        wide = replace(
            wide,
            scheduler=replace(wide.scheduler, max_num_drafts=most),
            drafts=FakeDrafts(most, rng.choice((0.0, 0.3, 0.7)), scenario.seed),
        )
    if kind != 0:
        wide = replace(
            wide,
            load_rate=rng.choice((0.3, 0.8)),
            store_rate=rng.choice((0.3, 0.8)),
            transfer_delay=rng.choice((0, 1, 3)),
            transfer_failure=rng.choice((0.0, 0.05)),
            death_rate=rng.choice((0.0, 0.0, 0.02)),
        )
    return wide


def with_states(scenario: Scenario) -> Scenario:
    """The same for a model with recurrent states: with few checkpoints, many, or none; every other with drafts."""
    rng = random.Random(f"states-{scenario.seed}")
    most = scenario.scheduler.max_num_seqs
    num_checkpoints = rng.choice((0, most, most, 2 * most, 40))
    cache = replace(scenario.cache, num_states=most, num_checkpoints=num_checkpoints)
    if scenario.seed % 2:
        num_drafts = rng.choice((1, 2, 5))
        cache = replace(cache, num_draft_states=num_drafts * rng.choice((1, 2, most)))
        scenario = replace(
            scenario,
            chains_steps=rng.random() < 0.3,
            scheduler=replace(scenario.scheduler, max_num_drafts=num_drafts),
            drafts=FakeDrafts(num_drafts, rng.choice((0.0, 0.3, 0.7)), scenario.seed),
        )
    return replace(scenario, cache=cache)


def make_scenario(seed: int) -> Scenario:
    """Draw a scenario. Fifteen seeds in a row cover every gate × order pair, 45 those with 1, 2 and 4 in flight."""
    rng = random.Random(f"adapters-{seed}")
    scenario = _draw(seed)
    scheduler = replace(scenario.scheduler, max_loras=rng.choice((1, 2, 5, 5)))
    threshold = random.Random(f"long-{seed}").choice((0, 0, 1, 4, 12))
    scheduler = replace(scheduler, long_prefill_token_threshold=threshold)
    return replace(scenario, scheduler=scheduler, adapter_rate=rng.choice((0.1, 0.1, 0.1, 0.9)))


def _draw(seed: int) -> Scenario:
    rng = random.Random(seed)
    gate = GATES[seed % 3]
    order = ORDERS[seed // 3 % len(ORDERS)]
    block_size = rng.choice((1, 2, 4, 4, 8, 16))
    max_model_len = rng.choice((24, 48, 80))
    chunked = rng.random() < 0.8
    max_num_seqs = rng.choice((1, 3, 6, 12))
    windows = rng.choice(WINDOWS)
    rows = -(-max_model_len // block_size)
    cache = CacheConfig(
        num_blocks=max(4, int(rows * len(windows) * rng.choice((0.7, 1.0, 1.3, 2.0, 4.0)))),
        block_size=block_size,
        windows=windows,
        enable_prefix_caching=rng.random() < 0.85,
        model_key=f"model-{seed}",
    )
    scheduler = SchedulerConfig(
        gate=gate,
        order=order,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.choice((1, 4, 16, 64, 256)) if chunked else rng.choice((32, 64, 256)),
        max_model_len=max_model_len,
        max_queue=rng.choice((4, 16, 1000)),
        enable_chunked_prefill=chunked,
        dynamic_max_wait_s=rng.choice((0.0, 0.05, 0.3)),
    )
    if seed % 5 == 4:
        return _hostile(seed, rng, scheduler, cache)
    faulty = rng.random() < 0.4
    faults = FakeFaults(
        step_error=rng.choice((0.0, 0.03, 0.06)) if faulty else 0.0,
        collect_raises=rng.choice((0.0, 0.02)) if faulty else 0.0,
        submit_raises=rng.choice((0.0, 0.02)) if faulty else 0.0,
        seq_error=rng.choice((0.0, 0.01, 0.03)) if faulty else 0.0,
        seed=seed,
    )
    return Scenario(
        seed=seed,
        scheduler=scheduler,
        cache=cache,
        model=FakeModel(vocab_size=rng.choice((20, 300)), eos_probability=rng.choice((0.0, 0.03, 0.1))),
        faults=faults,
        max_in_flight=(1, 2, 4)[seed // 12 % 3],
        num_requests=rng.randint(8, 40),
        arrivals_per_step=rng.choice((0.1, 0.5, 3.0)),
        abort_rate=rng.choice((0.0, 0.02, 0.1)),
        stop_string_rate=rng.choice((0.0, 0.2)),
        policy_rate=rng.choice((0.0, 0.0, 0.02)),
        num_prefixes=2,
        repeat_rate=0.2,
        deadline_rate=0.5 if seed % 4 == 1 else 0.0,
    )


def _hostile(seed: int, rng: random.Random, scheduler: SchedulerConfig, cache: CacheConfig) -> Scenario:
    """Draw a scenario in which many read what a step in flight publishes, and that step often fails."""
    return Scenario(
        seed=seed,
        scheduler=replace(
            scheduler,
            max_num_batched_tokens=rng.choice((24, 48)),
            max_num_seqs=12,
            max_queue=1000,
            enable_chunked_prefill=True,
        ),
        cache=replace(
            cache, num_blocks=max(cache.num_blocks, 600 // cache.block_size), enable_prefix_caching=True
        ),
        model=FakeModel(vocab_size=300, eos_probability=0.05),
        faults=FakeFaults(
            step_error=rng.choice((0.05, 0.15)),
            collect_raises=0.02,
            seq_error=rng.choice((0.0, 0.04)),
            seed=seed,
        ),
        max_in_flight=rng.choice((2, 4)),
        num_requests=60,
        arrivals_per_step=rng.choice((0.7, 1.0)),
        abort_rate=0.02,
        stop_string_rate=0.1,
        policy_rate=0.0,
        num_prefixes=1,
        repeat_rate=0.5,
    )


class RequestMaker:
    """Draws requests that share prefixes, at times resumed as after a restart."""

    def __init__(self, scenario: Scenario, rng: random.Random) -> None:
        self._scenario = scenario
        self._rng = rng
        self._kinds = random.Random(f"kinds-{scenario.seed}")  # apart: the rest of a scenario stays as it was
        self._count = 0
        self._last: tuple[int, ...] = ()
        self._turns: list[tuple[int, ...]] = []  # prompts with their answers, as the next turn sends them
        self._prefixes = [
            tuple(rng.randrange(100, 200) for _ in range(scenario.scheduler.max_model_len))
            for _ in range(scenario.num_prefixes)
        ]

    def make(self, now: float) -> Request:
        rng, scenario = self._rng, self._scenario
        longest = scenario.scheduler.max_model_len + (2 if rng.random() < 0.03 else -2)
        length = rng.randint(1, max(1, int(longest * rng.choice((0.3, 0.6, 1.0)))))
        shared = rng.randint(0, length) if rng.random() < 0.8 else 0
        if rng.random() < 0.3:  # whole blocks, so that full hits and forks at a block's edge are common
            length = max(1, length // scenario.cache.block_size * scenario.cache.block_size)
            shared = min(shared, length) if rng.random() < 0.5 else length
        prompt = rng.choice(self._prefixes)[:shared]
        prompt += tuple(rng.randrange(100, 200) for _ in range(length - len(prompt)))
        if self._last and rng.random() < scenario.repeat_rate:
            prompt = self._last  # the same again, often in the same step
        elif self._turns and rng.random() < 0.15:
            prompt = rng.choice(self._turns)[: scenario.scheduler.max_model_len - 2]
        self._last = prompt
        max_tokens = rng.randint(1, 24)
        sampling = SamplingParams(
            n=rng.choice((1, 1, 1, 2, 4)),
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.randrange(3),
            max_tokens=max_tokens,
            min_tokens=rng.choice((0, 0, min(4, max_tokens))),
            stop_token_ids=(STOP,) if rng.random() < 0.3 else (),
            eos_token_ids=(EOS,) if rng.random() < 0.7 else (),
        )
        self._count += 1
        request = Request(
            f"r{self._count}",
            prompt,
            sampling,
            arrival_s=now,
            terms=Terms(priority=rng.randrange(3), cache_salt="salt" if rng.random() < 0.1 else ""),
            adapter=rng.choice(ADAPTERS) if rng.random() < scenario.adapter_rate else None,
        )
        request = with_deadline(request, self._deadline())
        self._turns = [*self._turns[-3:], prompt + tuple(expected_output(request, 0, scenario)[0])]
        kind = self._kinds.random()
        if kind < 0.07:
            return self._beams(request)
        if kind < 0.14:
            request = replace(request, sampling=replace(sampling, prompt_logprobs=int(kind > 0.1)))
        return self._resumed(request) if rng.random() < 0.15 else request

    def _beams(self, request: Request) -> Request:
        """The same as a beam search, of the base model."""
        kinds, before = self._kinds, request.sampling
        n = kinds.choice((1, 2, 3))
        sampling = SamplingParams(
            n=n,
            best_of=n + kinds.choice((0, 1, 3)),
            use_beam_search=True,
            length_penalty=kinds.choice((1.0, 0.0, 1.7)),
            early_stopping=kinds.choice((False, True, "never")),
            seed=0,
            max_tokens=before.max_tokens,
            stop_token_ids=before.stop_token_ids,
            eos_token_ids=before.eos_token_ids,
        )
        limits = request.terms.deadline  # of the first token there is none to miss before the end
        deadline = None if limits is None else Deadline(None, limits.total_s or limits.first_token_s)
        return with_deadline(replace(request, sampling=sampling, adapter=None), deadline)

    def _deadline(self) -> Deadline | None:
        if self._rng.random() >= self._scenario.deadline_rate:
            return None
        first_s, total_s = self._rng.choice((None, 0.02, 0.1, 0.5)), self._rng.uniform(0.5, 1.5)
        return Deadline(first_s, total_s if first_s is None or self._rng.random() < 0.5 else None)

    def _resumed(self, request: Request) -> Request:
        """As a supervisor would send it again after a restart: some samples have output, some are finished."""
        outputs, finished = [], []
        for index in range(request.sampling.n):
            expected, _ = expected_output(request, index, self._scenario)
            outputs.append(tuple(expected[: self._rng.randint(0, len(expected))]))
            if self._rng.random() < 0.2:
                finished.append(index)
        return Request(
            request.request_id,
            request.prompt_token_ids,
            request.sampling,
            request.arrival_s,
            request.terms,
            request.adapter,
            output_token_ids=tuple(outputs),
            finished_samples=tuple(finished),
        )


def with_deadline(request: Request, deadline: Deadline | None) -> Request:
    return replace(request, terms=replace(request.terms, deadline=deadline))


def expected_output(request: Request, sample_index: int, scenario: Scenario) -> tuple[list[int], str]:
    """Return the oracle's tokens up to the end that the request itself sets, and the reason of that end."""
    sampling = request.sampling
    num_prompt = len(request.prompt_token_ids)
    assert sampling.max_tokens is not None
    longest = max(0, min(sampling.max_tokens, scenario.scheduler.max_model_len - num_prompt))
    if sampling.use_beam_search:
        if longest == 0:
            return [], "length"
        best = plain_search(request, scenario.scheduler.max_model_len, scenario.model)[sample_index]
        ends = best[-1] in {*sampling.eos_token_ids, *sampling.stop_token_ids}
        return best, "stop" if ends else "length"
    tokens = fake_tokens(
        request.prompt_token_ids, sampling, sample_index, longest, scenario.model, request.adapter
    )
    stops = {*sampling.eos_token_ids, *sampling.stop_token_ids}
    for count, token_id in enumerate(tokens, 1):
        if token_id in stops and count > sampling.min_tokens:
            return tokens[:count], "stop"
    return tokens, "length"
