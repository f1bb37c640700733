"""The fake executor is an oracle: whatever is wrong with the pages changes the tokens and is noted."""

from __future__ import annotations

import pytest
from tests.fakes.executor import FakeExecutor, FakeFaults
from tests.fakes.model import FakeModel, fake_tokens

from quire.config import CacheConfig
from quire.request import SamplingParams
from quire.step import KvMove, NewSeq, SeqPlan, StepPlan

MODEL = FakeModel(vocab_size=10_000, eos_probability=0.0)
PROMPT = tuple(range(10))
SAMPLING = SamplingParams(seed=1, max_tokens=8)


def executor(windows: tuple[int | None, ...] = (None,), **more: object) -> FakeExecutor:
    return FakeExecutor(CacheConfig(32, 4, windows), model=MODEL, **more)  # type: ignore[arg-type]


def new(seq_id: int, prompt: tuple[int, ...] = PROMPT, epoch: int = 0) -> NewSeq:
    return NewSeq(seq_id, epoch, prompt, (), SAMPLING, 0)


def run(worker: FakeExecutor, plan: StepPlan) -> list[tuple[int, ...]]:
    worker.submit(plan)
    result = worker.collect()
    assert result.error is None
    return [seq.token_ids for seq in result.seqs]


def prefill(worker: FakeExecutor, windows: int = 1) -> list[tuple[int, ...]]:
    tables = tuple(tuple(range(3 * g, 3 * g + 3)) for g in range(windows))
    plan = SeqPlan(0, 0, 0, 10, (0,) * windows, tables)
    return run(worker, StepPlan(0, (new(0),), (plan,)))


def decode(worker: FakeExecutor, position: int, step: int = 1) -> list[tuple[int, ...]]:
    return run(worker, StepPlan(step, (), (SeqPlan(0, 0, position, 1),)))


@pytest.mark.parametrize("windows", [(None,), (None, 3), (5, None)])
def test_tokens_are_those_of_the_plain_function(windows: tuple[int | None, ...]) -> None:
    worker = executor(windows)
    got = prefill(worker, len(windows)) + decode(worker, 10) + decode(worker, 11)
    assert [t for (t,) in got] == fake_tokens(PROMPT, SAMPLING, 0, 3, MODEL)
    assert worker.violations == []


def test_chunks_do_not_matter() -> None:
    worker = executor()
    got = run(worker, StepPlan(0, (new(0),), (SeqPlan(0, 0, 0, 7, (0,), ((4, 9),)),)))
    got += run(worker, StepPlan(1, (), (SeqPlan(0, 0, 7, 3, (2,), ((1,),)),)))
    assert got == [(), tuple(fake_tokens(PROMPT, SAMPLING, 0, 1, MODEL))]


def test_samples_seeds_and_greedy() -> None:
    drawn = {
        tuple(fake_tokens(PROMPT, SamplingParams(seed=seed), index, 4, MODEL))
        for seed in (1, 2)
        for index in (0, 1)
    }
    assert len(drawn) == 4
    greedy = SamplingParams(temperature=0.0, seed=1)
    assert fake_tokens(PROMPT, greedy, 0, 4, MODEL) == fake_tokens(PROMPT, greedy, 1, 4, MODEL)


def test_eos_comes_only_after_min_tokens() -> None:
    model = FakeModel(eos_probability=1.0)
    sampling = SamplingParams(seed=1, min_tokens=3, eos_token_ids=(2,), max_tokens=9)
    tokens = fake_tokens(PROMPT, sampling, 0, 4, model)
    assert 2 not in tokens[:3]
    assert tokens[3] == 2


def test_a_share_of_other_tokens_is_noticed() -> None:
    worker = executor()
    prefill(worker)
    other = (*range(50, 54), *PROMPT[4:])
    got = run(worker, StepPlan(1, (new(1, other),), (SeqPlan(1, 0, 4, 6, (0,), ((0, 8, 9),)),)))
    assert worker.violations
    assert got != [tuple(fake_tokens(other, SAMPLING, 0, 1, MODEL))]


def test_a_missing_copy_is_noticed() -> None:
    fork = SeqPlan(1, 0, 9, 1, (0,), ((0, 1, 9),))
    for moves, good in (((KvMove(2, 9),), True), ((), False)):
        worker = executor()
        prefill(worker)
        got = run(worker, StepPlan(1, (new(1),), (fork,), kv_moves=moves))
        assert (got == [tuple(fake_tokens(PROMPT, SAMPLING, 0, 1, MODEL))]) is good
        assert (worker.violations == []) is good


def test_a_window_that_slid_too_far_is_noticed() -> None:
    for last_row_only, good in ((False, True), (True, False)):
        worker = executor((None, 6))
        prefill(worker, 2)
        # The query at 10 sees 5…10 of group 1: rows 1 and 2. Row 1 is overwritten when it was given up too early.
        row1 = 30 if last_row_only else 4
        worker.submit(StepPlan(1, (), (SeqPlan(0, 0, 10, 1, (3, 1), ((), (row1,))),)))
        worker.collect()
        assert (worker.violations == []) is good


def test_a_row_left_out_and_an_old_epoch_are_noticed() -> None:
    worker = executor()
    prefill(worker)
    worker.submit(StepPlan(1, (), (SeqPlan(0, 0, 11, 1), SeqPlan(0, 7, 10, 1))))
    result = worker.collect()
    assert [seq.error is not None for seq in result.seqs] == [True, True]
    assert len(worker.violations) == 2 + 1  # position, unknown token; epoch


def test_a_block_reused_while_in_use_is_noticed() -> None:
    worker = executor(max_in_flight=2)
    worker.submit(StepPlan(0, (new(0),), (SeqPlan(0, 0, 0, 10, (0,), ((0, 1, 2),)),)))
    worker.submit(StepPlan(1, (new(1),), (SeqPlan(1, 0, 0, 10, (0,), ((5, 2, 6),)),), gone=(0,)))
    assert worker.violations == ["step 1 writes block 2, in use by step 0"]


def test_a_failed_step_leaves_garbage_and_a_worker_that_goes_on() -> None:
    worker = executor(faults=FakeFaults(step_error=1.0))
    worker.submit(StepPlan(0, (new(0),), (SeqPlan(0, 0, 0, 10, (0,), ((0, 1, 2),)),)))
    assert worker.collect().error is not None
    assert worker.seq_ids == set()
