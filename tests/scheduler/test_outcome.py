"""What ends a sequence, and what its events say."""

from __future__ import annotations

from tests.fakes.integrity import check_integrity
from tests.scheduler.harness import Engine, answer, make_scheduler, oracle, request, step

from quire.request import FinishReason


def test_a_stop_id_ends_and_is_the_last_token() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", stop_token_ids=(9,), eos_token_ids=(2,)), 0.0)
    (first,) = step(scheduler, token_id=5)
    assert first.finish_reason is None
    (last,) = step(scheduler, token_id=9)
    assert (last.token_ids, last.finish_reason, last.stop_token_id) == ((9,), FinishReason.STOP, 9)
    assert not scheduler.has_work


def test_eos_ends_after_min_tokens_only() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", eos_token_ids=(2,), min_tokens=2, max_tokens=9), 0.0)
    reasons = [step(scheduler, token_id=2)[0].finish_reason for _ in range(3)]
    assert reasons == [None, None, FinishReason.STOP]


def test_max_tokens_and_the_context_end() -> None:
    for config, max_tokens, expected in (
        ({}, 3, 3),
        ({"max_model_len": 10}, 30, 2),
        ({"max_model_len": 10}, None, 2),
    ):
        scheduler = make_scheduler(**config)  # type: ignore[arg-type]
        scheduler.add(request("a", 8, max_tokens=max_tokens), 0.0)
        events = []
        while scheduler.has_work:
            events += step(scheduler)
        assert len(events) == expected
        assert events[-1].finish_reason is FinishReason.LENGTH


def test_a_stop_at_the_last_token_is_a_stop() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", max_tokens=1, eos_token_ids=(2,)), 0.0)
    (event,) = step(scheduler, token_id=2)
    assert event.finish_reason is FinishReason.STOP


def test_events_tell_times_and_cached_tokens() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", range(20), arrival_s=1.0), 1.0)
    (first,) = step(scheduler, 3.0)
    assert first.timing is not None
    assert (first.timing.queued_s, first.timing.ttft_s, first.timing.num_cached_tokens) == (2.0, 2.0, 0)
    step(scheduler, 4.0)
    scheduler.add(request("b", range(18), arrival_s=5.0), 5.0)
    event = next(e for e in step(scheduler, 5.5) if e.request_id == "b")
    assert event.timing is not None
    assert (event.timing.num_cached_tokens, event.timing.queued_s) == (16, 0.5)
    last = next(
        e for e in step(scheduler, 6.0) + step(scheduler, 7.0) if e.request_id == "a" and e.finish_reason
    )
    assert last.timing is not None
    assert last.timing.ttft_s == 2.0


def test_n_counts_its_cached_tokens_once() -> None:
    """Its siblings find the leader's blocks in the tree; that is no hit of the request."""
    engine = Engine(make_scheduler(max_num_seqs=2))
    engine.put([request("a", 18, n=4)])
    engine.run()
    assert {engine.end("a", i).timing.num_cached_tokens for i in range(4)} == {0}


def test_finish_ends_one_sample_and_frees_it() -> None:
    scheduler = make_scheduler(caching=False)
    scheduler.add(request("a", 8, n=2, max_tokens=20), 0.0)
    for _ in range(4):
        step(scheduler)
    held = scheduler.stats().num_free_blocks
    (event,) = scheduler.finish("a", 1, 2)
    assert (event.sample_index, event.finish_reason, event.token_ids) == (1, FinishReason.STOP, ())
    assert scheduler.stats().num_free_blocks > held
    assert scheduler.finish("a", 1, 2) == []
    assert scheduler.finish("unknown", 0, 1) == []
    assert {e.sample_index for e in step(scheduler)} == {0}


def test_abort_ends_every_sample_wherever_it_is() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    scheduler.add(request("running", n=2), 0.0)
    scheduler.add(request("waiting", n=3), 0.0)
    step(scheduler)
    for name, count in (("running", 2), ("waiting", 3)):
        events = scheduler.abort(name)
        assert sorted(e.sample_index for e in events) == list(range(count))
        assert {e.finish_reason for e in events} == {FinishReason.ABORT}
        assert scheduler.abort(name) == []
    check_integrity(scheduler)
    assert not scheduler.has_work
    assert scheduler.stats().num_free_blocks + scheduler.stats().num_idle_blocks == 64


def test_the_worker_is_told_who_is_gone() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", max_tokens=2), 0.0)
    scheduler.add(request("b", max_tokens=3), 0.0)
    step(scheduler)
    step(scheduler)
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert plan.gone == (0,)
    scheduler.apply(answer(scheduler, plan), 0.0)


def test_a_missing_result_is_an_error_of_that_sequence() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a"), 0.0)
    scheduler.add(request("b"), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    result = answer(scheduler, plan)
    events = scheduler.apply(type(result)(plan.step, result.seqs[1:]), 0.0)
    assert {e.request_id: e.finish_reason for e in events} == {"a": FinishReason.ERROR, "b": None}


def test_results_may_come_in_any_order() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a"), 0.0)
    scheduler.add(request("b"), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    result = answer(scheduler, plan)
    events = scheduler.apply(type(result)(plan.step, result.seqs[::-1]), 0.0)
    assert [e.request_id for e in events] == ["a", "b"]


def test_logprobs_pass_through() -> None:
    engine = Engine(make_scheduler())
    one = request("a", logprobs=2, max_tokens=3)
    engine.put([one])
    engine.run()
    drawn = [e.logprobs[0].token_id for e in engine.events["a", 0] if e.logprobs]
    assert drawn == oracle(one)
