"""Whatever else is in the batch: logits bitwise and tokens equal to the request run alone.

A case is a tiny model and a dtype; each serves the same 64 requests under several policies with a pool small enough to
preempt. Over all cases every gate × order × budget occurs. The last test demands that the runs exercised what they
claim to, and `-s` prints it. See docs/exactness.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest
from tests.exact.alone import AloneDriver
from tests.exact.engine_run import Ended, EngineRun, Policy, Tally, engine_config
from tests.exact.models import EOS, MAX_MODEL_LEN, MODELS, VOCAB
from tests.exact.recorder import Draw, Key, recording
from tests.exact.traffic import Job, make_jobs

from quire.config import GATES, ORDERS
from quire.executor.local import LocalExecutor
from quire.models import random_weights
from quire.request import FinishReason, TokenLogprobs

NUM_REQUESTS = 64
BUDGETS = (16, 48, 256, 2048)
BLOCK_SIZE = 8
NUM_BLOCKS = {"llama": 22, "sliding": 44, "moe": 22}  # two sequences of the longest kind hardly fit


@dataclass(frozen=True, slots=True)
class Case:
    """A model, a dtype and the seed of its traffic."""

    model: str
    dtype: str
    seed: int

    def __str__(self) -> str:
        return f"{self.model}-{self.dtype}-seed{self.seed}"


@dataclass(frozen=True, slots=True)
class Truth:
    """What each sequence gives alone."""

    jobs: tuple[Job, ...]
    draws: dict[Key, Draw]
    outputs: dict[tuple[str, int], tuple[tuple[int, ...], FinishReason]]


DTYPES = ("float32", "bfloat16")
CASES = [Case(model, dtype, seed) for seed, (model, dtype) in enumerate(itertools.product(MODELS, DTYPES), 1)]
POLICIES = [Policy(*triple) for triple in itertools.product(GATES, ORDERS, BUDGETS)]
TALLIES: dict[Case, Tally] = {}


@pytest.fixture(autouse=True)
def lively_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a spread of 0.3 the little models have opinions: attention matters and tokens vary."""
    monkeypatch.setattr(random_weights, "STD", 0.3)


def policies_of(case: Case) -> Iterator[Policy]:
    """Deal the policies out to the cases, so that all of them together have each one."""
    start = CASES.index(case) if case in CASES else case.seed % len(CASES)
    yield from POLICIES[start :: len(CASES)]


@cache
def truth_of(case: Case) -> Truth:
    """Run every sequence of the case alone, on an engine with room for one."""
    jobs = make_jobs(case.seed, NUM_REQUESTS, VOCAB, EOS, max_prompt=90, max_output=14)
    config = engine_config(
        MODELS[case.model](),
        case.dtype,
        num_blocks=2 * MAX_MODEL_LEN // BLOCK_SIZE + 2,
        block_size=BLOCK_SIZE,
        policy=POLICIES[0],
    )
    outputs = {}
    with recording() as recorder:
        driver = AloneDriver(LocalExecutor(config), config.kv_layout, BLOCK_SIZE, MAX_MODEL_LEN)
        for job in jobs:
            for index in range(job.request.sampling.n):
                outputs[job.request.request_id, index] = driver.run(job.request, index)
    return Truth(tuple(jobs), recorder.draws, outputs)


def serve(case: Case, policy: Policy, *, num_threads: int = 1) -> tuple[EngineRun, dict[Key, Draw]]:
    """Serve the case's traffic in one engine, all together; return what was drawn."""
    config = engine_config(
        MODELS[case.model](),
        case.dtype,
        num_blocks=NUM_BLOCKS[case.model],
        block_size=BLOCK_SIZE,
        policy=policy,
        num_threads=num_threads,
    )
    with recording() as recorder:
        run = EngineRun(config, LocalExecutor(config), policy)
        run.serve(truth_of(case).jobs)
    assert not recorder.conflicts, f"{case}, {policy}: drawn twice and differently: {recorder.conflicts[:5]}"
    run.tally.num_draws = len(recorder.draws)
    return run, recorder.draws


def check(case: Case, policy: Policy, run: EngineRun, draws: dict[Key, Draw]) -> None:
    truth = truth_of(case)
    here = f"{case}, {policy}"
    other_logits = [
        key for key, draw in draws.items() if draw.logits_digest != truth.draws[key].logits_digest
    ]
    assert not other_logits, (
        f"{here}: logits of {len(other_logits)} draws differ from alone: {other_logits[:5]}"
    )
    other_samples = [key for key, draw in draws.items() if draw != truth.draws[key]]
    assert not other_samples, f"{here}: equal logits, other samples: {other_samples[:5]}"
    for (request_id, index), ended in run.ended.items():
        check_client(f"{here}, {request_id}[{index}]", ended, truth.outputs[request_id, index])


def check_client(name: str, ended: Ended, alone: tuple[tuple[int, ...], FinishReason]) -> None:
    """The stream of events told the client the same tokens and the same end."""
    output, reason = alone
    assert ended.error is None, f"{name}: {ended.error}"
    assert ended.reason is not None, f"{name}: no terminal event"
    if ended.reason is FinishReason.ABORT:
        assert tuple(ended.token_ids) == output[: len(ended.token_ids)], name
    else:
        assert (tuple(ended.token_ids), ended.reason) == (output, reason), name


def run_case(case: Case) -> Tally:
    if case not in TALLIES:
        tally = Tally()
        for policy in policies_of(case):
            run, draws = serve(case, policy)
            check(case, policy, run, draws)
            tally += run.tally
        TALLIES[case] = tally
    return TALLIES[case]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_everyone_together_equals_each_one_alone(case: Case) -> None:
    print(f"\n{case}: {run_case(case)}")


def test_two_threads_equal_one() -> None:
    case = CASES[0]
    run, draws = serve(case, Policy("continuous", "fcfs", 48), num_threads=2)
    check(case, Policy("continuous", "fcfs", 48), run, draws)


def test_the_traffic_covers_what_it_claims() -> None:
    """Guards the suite itself: without preemptions, hits, chunks, forks and aborts it would prove little."""
    total = Tally()
    for case in CASES:
        total += run_case(case)
    print(f"\nexact suite: {total}")
    assert total.policies == set(POLICIES)
    assert total.num_preemptions >= 20
    assert total.num_cached_tokens >= 0.3 * total.num_prompt_tokens
    assert total.num_chunked_prompts >= 100
    assert total.num_forks >= 20
    assert total.num_aborts >= 10
    assert total.num_moves >= 20
    for tally in TALLIES.values():
        assert tally.num_preemptions > 0


def test_sequences_alone_are_worth_comparing() -> None:
    """The truth itself: varied tokens, ends of both kinds, logprobs among the samples."""
    truth = truth_of(CASES[0])
    reasons = {reason for _, reason in truth.outputs.values()}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    assert len({token_id for output, _ in truth.outputs.values() for token_id in output}) > VOCAB // 4
    assert any(isinstance(draw.sample.logprobs, TokenLogprobs) for draw in truth.draws.values())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 112))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
def test_more_seeds(model: str, dtype: str, seed: int) -> None:
    case = Case(model, dtype, seed)
    for policy in policies_of(case):
        run, draws = serve(case, policy)
        check(case, policy, run, draws)
