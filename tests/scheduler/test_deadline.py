"""Deadlines: refused where hopeless, ended where missed, and what the estimate is made of."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.fakes.integrity import check_integrity
from tests.scheduler.harness import Engine, answer, make_scheduler, oracle, request, step

from quire.request import Deadline, FinishReason, Request
from quire.scheduler.predictor import Predictor
from quire.scheduler.scheduler import Sleep


def due(one: Request, first_s: float | None = None, total_s: float | None = None) -> Request:
    return replace(one, terms=replace(one.terms, deadline=Deadline(first_s, total_s)))


def test_the_estimate_is_a_function_of_the_pace_and_the_queue() -> None:
    pace = Predictor()
    assert pace.first_token_s(1000, 0.0, 100) == 0.0, "nothing is known yet"
    for i in range(400):
        pace.note((), i * 0.1, i * 0.1 + 0.1, num_prompt_tokens=50)
    assert pace.step_s == pytest.approx(0.1)
    assert pace.prompt_token_s == pytest.approx(0.1 / 50)
    assert pace.first_token_s(0, 0.0, 10) == pytest.approx(0.1), "a step is the least"
    assert pace.first_token_s(500, 0.0, 100) == pytest.approx(1.2)
    assert pace.first_token_s(0, 3.0, 100) == pytest.approx(3.2)
    for i in range(400, 500):  # it follows what changes
        pace.note((), i * 0.1, i * 0.1 + 0.02, num_prompt_tokens=0)
    assert pace.step_s == pytest.approx(0.02, rel=0.1)
    assert pace.prompt_token_s == pytest.approx(0.1 / 50), "steps without prompts say nothing of prompts"


def test_steps_that_overlap_are_not_counted_twice() -> None:
    pace = Predictor()
    pace.note((), 0.0, 1.0, num_prompt_tokens=0)
    pace.note((), 0.1, 1.5, num_prompt_tokens=0)  # planned while the first was out
    assert pace.step_s == pytest.approx((1.0 + 0.5) / 2)


def busy(num_waiting: int = 4) -> Engine:
    """An engine with two seats whose steps have taken 0.01 s for a while."""
    engine = Engine(make_scheduler(max_num_seqs=2), in_flight=2)
    engine.put(request(f"w{i}", max_tokens=8, arrival_s=0.0) for i in range(num_waiting + 2))
    for _ in range(6):
        engine.step()
    return engine


def test_the_hopeless_are_refused_with_when_to_come_again() -> None:
    engine = busy()
    now = engine.clock.now()
    engine.put(
        [due(request("no", arrival_s=now), first_s=0.001), due(request("yes", arrival_s=now), first_s=50.0)]
    )
    engine.run()
    end = engine.end("no")
    assert (end.finish_reason, end.error_kind) == (FinishReason.ERROR, "hopeless")
    assert "deadline_ms.first_token = 1 cannot be met" in (end.error or "")
    assert end.retry_after_s > 0
    assert engine.end("yes").finish_reason is FinishReason.LENGTH
    assert engine.scheduler.stats().num_refused == 1


def test_a_total_counts_the_output_that_is_certain() -> None:
    engine = busy()
    now = engine.clock.now()
    asked = [request("certain", max_tokens=40, arrival_s=now), request("may stop", max_tokens=40, arrival_s=now,
                                                                      eos_token_ids=(499,))]  # fmt: skip
    engine.put(due(one, total_s=0.3) for one in asked)
    engine.step()
    assert engine.end("certain").error_kind == "hopeless"
    assert "may stop" in engine.scheduler.state.requests


def test_an_idle_engine_tries_and_a_missed_total_keeps_what_was_made() -> None:
    engine = Engine(make_scheduler())
    one = due(request("a", max_tokens=40, n=2), total_s=0.095)
    engine.put([one])
    engine.run()
    for index in range(2):
        end = engine.end("a", index)
        assert (end.finish_reason, end.error_kind) == (FinishReason.DEADLINE, "deadline")
        tokens = engine.tokens("a", index)
        assert 5 <= len(tokens) < 40
        assert tokens == oracle(one, index)[: len(tokens)]
        assert end.error == f"deadline_ms.total = 95 has passed after {len(tokens)} output tokens."
    assert engine.scheduler.stats().num_expired == 2


def test_a_first_token_that_does_not_come_or_comes_late() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(request("running", max_tokens=30), 0.0)
    step(scheduler, 0.0)
    scheduler.add(due(request("waits"), first_s=1.0), 0.0)
    assert scheduler.expire(0.999) == []
    (event,) = scheduler.expire(1.0)
    assert event.error == "deadline_ms.first_token = 1000 has passed before the first token."
    assert scheduler.expire(5.0) == []
    scheduler.abort("running")
    scheduler.add(due(request("late"), first_s=1.0), 0.0)
    assert scheduler.plan(0.5) is not None
    (event,) = scheduler.fail_in_flight("x", 0.6)  # a failed step is that, not a missed deadline
    assert event.error_kind == "step"
    scheduler.add(due(request("later"), first_s=1.0), 0.0)
    plan = scheduler.plan(0.5)
    assert plan is not None
    (event,) = scheduler.apply(answer(scheduler, plan), 1.5)
    assert (event.finish_reason, event.token_ids) == (FinishReason.DEADLINE, ())
    check_integrity(scheduler)


def test_the_engine_wakes_for_a_deadline_behind_a_closed_gate() -> None:
    scheduler = make_scheduler(gate="dynamic", dynamic_max_wait_s=10.0)
    scheduler.add(due(request("a"), total_s=2.0), 0.0)
    assert scheduler.plan(0.0) is None
    assert scheduler.next_action(1.0) == Sleep(2.0)
    assert [e.finish_reason for e in scheduler.expire(2.0)] == [FinishReason.DEADLINE]
    assert not scheduler.has_work


def test_events_count_steps_and_chunks() -> None:
    engine = Engine(make_scheduler(max_num_batched_tokens=8))
    engine.put([request("a", 20, max_tokens=6)])
    engine.run()
    events = engine.events["a", 0]
    told = {index: event.timing for index, event in enumerate(events) if event.timing is not None}
    assert [*told] == [0, 5], "told with the first token and at the end"
    assert [(timing.num_chunks, timing.num_steps) for timing in told.values()] == [(3, 3), (3, 8)]
    assert told[0].cache_miss == "not in the cache"
    engine.put([request("a", 20, max_tokens=2)])
    engine.run()
    assert engine.events["a", 0][-1].timing.cache_miss == ""
