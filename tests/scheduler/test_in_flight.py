"""Steps in flight: zombies, forks, preemptions and failures while results are still to come."""

from __future__ import annotations

import pytest
from tests.fakes.integrity import check_integrity
from tests.scheduler.harness import Engine, answer, make_scheduler, oracle, request, step

from quire.request import FinishReason
from quire.step import SeqResult, StepResult


def test_the_next_token_is_planned_before_the_last_is_known() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 8, max_tokens=4), 0.0)
    plans = [scheduler.plan(0.0) for _ in range(5)]
    assert [(p.seqs[0].num_computed_tokens, p.seqs[0].num_scheduled_tokens) for p in plans if p] == [
        (0, 8),
        (8, 1),
        (9, 1),
        (10, 1),
    ]
    assert plans[4] is None, "all four tokens are on their way"


def test_a_zombie_keeps_blocks_until_its_last_step_is_applied() -> None:
    scheduler = make_scheduler(caching=False)
    scheduler.add(request("a", 8, max_tokens=9, eos_token_ids=(2,)), 0.0)
    first, second = scheduler.plan(0.0), scheduler.plan(0.0)
    assert first is not None
    assert second is not None
    (event,) = scheduler.apply(StepResult(0, (SeqResult(0, 0, (2,)),)), 0.0)
    assert event.finish_reason is FinishReason.STOP
    assert scheduler.stats().num_free_blocks == 61
    assert scheduler.has_work
    assert scheduler.apply(StepResult(1, (SeqResult(0, 0, (3,)),)), 0.0) == []
    assert scheduler.stats().num_free_blocks == 64
    assert scheduler.stats().num_zombie_results == 1
    assert not scheduler.has_work


def test_forks_share_the_prompt_and_compute_its_last_token_each() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 10, n=3), 0.0)
    first = scheduler.plan(0.0)
    assert first is not None
    assert [tuple(p[:4]) for p in first.seqs] == [(0, 0, 0, 9)]
    second = scheduler.plan(0.0)
    assert second is not None
    assert [tuple(p[:4]) for p in second.seqs] == [(0, 0, 9, 1), (1, 0, 9, 1), (2, 0, 9, 1)]
    tables = [p.new_block_ids[0] for p in second.seqs[1:]]
    leader = first.seqs[0].new_block_ids[0]
    assert all(t[:2] == leader[:2] for t in tables)
    assert [tuple(m) for m in second.kv_moves] == [(leader[2], t[2]) for t in tables]
    assert [n.sample_index for n in second.new_seqs] == [1, 2]


def test_a_prompt_of_one_token_forks_at_once() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 1, n=3), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert [tuple(p[:4]) for p in plan.seqs] == [(0, 0, 0, 1), (1, 0, 0, 1), (2, 0, 0, 1)]


@pytest.mark.parametrize("in_flight", [1, 2, 4])
@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 8, 9])
def test_n_equals_each_sample_asked_alone(prompt: int, in_flight: int) -> None:
    one = request("a", prompt, n=4, max_tokens=9)
    engine = Engine(make_scheduler(), in_flight=in_flight)
    engine.put([one, request("b", prompt, n=4, max_tokens=9)])
    engine.run()
    texts = [engine.tokens("a", i) for i in range(4)]
    assert texts == [oracle(one, i) for i in range(4)]
    assert len({tuple(t) for t in texts}) == 4


@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_preempted_sequences_end_with_the_same_tokens(in_flight: int) -> None:
    requests = [request(f"r{i}", 8, max_tokens=20) for i in range(4)]
    engine = Engine(make_scheduler(num_blocks=12), in_flight=in_flight)
    engine.put(requests)
    engine.run()
    assert all(engine.tokens(one.request_id) == oracle(one) for one in requests)
    assert engine.core.stats().num_preemptions >= 2


def test_readmission_has_a_new_epoch_and_the_output() -> None:
    scheduler = make_scheduler(num_blocks=7, caching=False)
    scheduler.add(request("a", 8, max_tokens=12), 0.0)
    scheduler.add(request("b", 8, max_tokens=12), 0.0)
    admissions = []
    while scheduler.has_work:
        plan = scheduler.plan(0.0)
        assert plan is not None
        admissions += [(n.seq_id, n.epoch, len(n.output_token_ids)) for n in plan.new_seqs]
        scheduler.apply(answer(scheduler, plan), 0.0)
        check_integrity(scheduler)
    assert admissions[:2] == [(0, 0, 0), (1, 0, 0)]
    assert admissions[2][:2] == (1, 1)
    assert admissions[2][2] > 0


def test_a_failed_step_withdraws_what_it_published() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 8), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert scheduler.stats().num_cached_blocks == 2
    (event,) = scheduler.apply(StepResult(0, error="out of luck"), 0.0)
    assert (event.finish_reason, event.error_kind, event.error) == (FinishReason.ERROR, "step", "out of luck")
    assert scheduler.stats().num_cached_blocks == 0
    assert scheduler.stats().num_free_blocks == 64


def test_a_reader_of_a_failed_step_starts_again() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    shared = list(range(8))
    scheduler.add(request("writer", shared), 0.0)
    first = scheduler.plan(0.0)
    assert first is not None
    scheduler.add(request("reader", [*shared, 50]), 0.0)
    second = scheduler.plan(0.0)
    assert second is not None
    assert {p.seq_id for p in second.seqs} == {0, 1}
    events = scheduler.apply(StepResult(0, error="failed"), 0.0)
    assert [e.request_id for e in events] == ["writer"]
    check_integrity(scheduler)
    assert scheduler.apply(answer(scheduler, second), 0.0) == [], "what the reader read cannot be trusted"
    assert scheduler.stats().num_restarted_readers == 1
    third = scheduler.plan(0.0)
    assert third is not None
    assert [tuple(p[:4]) for p in third.seqs] == [(1, 1, 0, 9)]


def test_a_failed_sequence_takes_its_readers_of_the_same_step_along() -> None:
    scheduler = make_scheduler()
    shared = list(range(8))
    scheduler.add(request("writer", shared), 0.0)
    scheduler.add(request("reader", [*shared, 50]), 0.0)
    scheduler.add(request("other", 8), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    good = answer(scheduler, plan)
    bad = (SeqResult(0, 0, (), error="broken"), *good.seqs[1:])
    events = scheduler.apply(StepResult(0, bad), 0.0)
    assert {e.request_id: e.finish_reason for e in events} == {"writer": FinishReason.ERROR, "other": None}
    assert scheduler.stats().num_restarted_readers == 1
    check_integrity(scheduler)


def test_fail_in_flight_fails_all_that_is_out_and_nothing_else() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(request(name), 0.0)
    scheduler.plan(0.0)
    scheduler.plan(0.0)
    events = scheduler.fail_in_flight("the worker died", 0.0)
    assert sorted(e.request_id for e in events) == ["a", "b"]
    check_integrity(scheduler)
    assert scheduler.stats().num_in_flight == 0
    (event,) = step(scheduler)
    assert event.request_id == "c"


def test_gone_is_told_again_when_the_step_that_told_it_failed() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", max_tokens=1), 0.0)
    scheduler.add(request("b"), 0.0)
    step(scheduler)
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert plan.gone == (0,)
    scheduler.add(request("c"), 0.0)
    scheduler.apply(StepResult(plan.step, error="failed"), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert set(plan.gone) == {0, 1}


def test_siblings_go_on_when_their_leader_fails_before_the_fork() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add(request("a", 9, n=3), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    events = scheduler.apply(StepResult(plan.step, error="failed"), 0.0)
    assert [(e.sample_index, e.finish_reason) for e in events] == [(0, FinishReason.ERROR)]
    ends = []
    while scheduler.has_work:
        ends += [e.sample_index for e in step(scheduler) if e.finish_reason is not None]
    assert ends == [1, 2]
    assert scheduler.stats().num_forks == 1


def test_a_sibling_whose_copied_tail_failed_starts_again() -> None:
    """Its move was in the failed step though it had no row there itself."""
    scheduler = make_scheduler(max_num_batched_tokens=2)
    scheduler.add(request("a", 3, n=4), 0.0)
    step(scheduler)
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert len(plan.kv_moves) == 3
    assert len(plan.seqs) == 2
    events = scheduler.apply(StepResult(plan.step, error="failed"), 0.0)
    assert len(events) == 2
    assert scheduler.stats().num_restarted_readers == 2
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert [p.num_computed_tokens for p in plan.seqs] == [0]


def test_the_first_in_rank_gets_room_though_one_behind_it_found_none() -> None:
    """Rows go round robin, blocks by rank: else the first could wait for ever behind the last."""
    scheduler = make_scheduler(num_blocks=3, max_num_batched_tokens=1, max_num_seqs=3, caching=False)
    for i in range(3):
        scheduler.add(request(f"r{i}", 1, max_tokens=8), 0.0)
    ends = []
    for _ in range(200):
        ends += [e.request_id for e in step(scheduler) if e.finish_reason is not None]
    assert ends == ["r0", "r1", "r2"]


def test_prompts_are_published_at_plan_outputs_at_apply() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 7, max_tokens=9), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert scheduler.stats().num_cached_blocks == 1
    scheduler.apply(answer(scheduler, plan), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert plan.seqs[0].num_computed_tokens == 7, "this row fills the second block, of prompt and output"
    assert scheduler.stats().num_cached_blocks == 1
    scheduler.apply(answer(scheduler, plan), 0.0)
    assert scheduler.stats().num_cached_blocks == 2


def test_a_resumed_output_is_published_at_apply_too() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 7, max_tokens=9, outputs=((1, 2, 3, 4, 5),)), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert plan.seqs[0].num_scheduled_tokens == 12
    assert scheduler.stats().num_cached_blocks == 1
    scheduler.apply(answer(scheduler, plan), 0.0)
    assert scheduler.stats().num_cached_blocks == 3


def test_a_sibling_of_a_leader_that_failed_behind_it_starts_again() -> None:
    """It shares full blocks, so no move tells of it; its leader's step in flight does."""
    scheduler = make_scheduler(caching=False)
    scheduler.add(request("a", 9, n=2), 0.0)
    first, second = scheduler.plan(0.0), scheduler.plan(0.0)
    assert first is not None
    assert second is not None
    assert not second.kv_moves
    events = scheduler.apply(StepResult(first.step, error="failed"), 0.0)
    assert [e.sample_index for e in events] == [0]
    assert scheduler.apply(answer(scheduler, second), 0.0) == []
    assert scheduler.stats().num_restarted_readers == 1
