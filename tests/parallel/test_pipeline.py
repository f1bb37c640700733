"""Pipeline stages give the bits of one process, with a step in flight per stage."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.engine.test_process import gone, wait_for
from tests.exact.engine_run import Policy
from tests.exact.suite import Case
from tests.parallel.serving import CASE, FCFS, config_of, serve

from quire.executor.ranks import RanksExecutor
from quire.parallel.topology import Topology
from quire.step import StepPlan

TWO = Topology(pp=2)
OTHERS = (Policy("continuous", "priority", 48), Policy("dynamic", "fcfs", 48))


@pytest.fixture(scope="module")
def stages() -> Iterator[RanksExecutor]:
    executor = RanksExecutor(config_of(CASE, TWO))
    assert executor.max_in_flight == 2
    assert not executor.chains_steps
    yield executor
    pids = executor.pids
    executor.close()
    assert all(map(gone, pids))


@pytest.mark.parametrize(
    "policy", [FCFS, Policy("continuous", "priority", 48), Policy("dynamic", "fcfs", 48)]
)
def test_two_stages_give_the_tokens_of_one_process(stages: RanksExecutor, policy: Policy) -> None:
    tally = serve(CASE, stages, config_of(CASE, TWO), policy).tally
    assert tally.num_forks > 0
    assert tally.num_moves > 0
    assert tally.num_chunked_prompts > 0


def test_bytes_sent_are_those_of_the_hidden_states(stages: RanksExecutor) -> None:
    config = config_of(CASE, TWO)
    before = stages.rank_stats()
    run = serve(CASE, stages, config, FCFS)
    wait_for(lambda: stages.rank_stats().busy_s[0] > before.busy_s[0])
    stages.submit(StepPlan(0))  # its answer comes behind the counts of the steps before
    stages.collect()
    after = stages.rank_stats()
    num_bytes = after.bytes_sent[0] - before.bytes_sent[0]
    num_tokens = run.num_computed_tokens
    assert num_bytes == 2 * num_tokens * config.model.spec.hidden_size * 2
    assert after.bytes_sent[1] == 0
    assert after.out_s > 0.0
    assert 0.0 <= after.bubbles < 1.0


@pytest.mark.parametrize(
    ("case", "drafts"),
    [
        (
            Case("sliding", "float32", 47, num_requests=24),
            "none",
        ),  # a stage has the layers of one cache group alone
        (Case("llama", "float32", 48, num_requests=24), "ngram"),
        (Case("llama", "float32", 48, num_requests=24), "self"),
    ],
    ids=["sliding", "ngram", "draft"],
)
@pytest.mark.slow
def test_two_stages_serve_every_kind_of_step(case: Case, drafts: str) -> None:
    policy = Policy("continuous", "fcfs", 48, drafts)  # type: ignore[arg-type]
    config = config_of(case, TWO, policy)
    executor = RanksExecutor(config)
    try:
        serve(case, executor, config, policy)
    finally:
        executor.close()
