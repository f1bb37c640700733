"""Who comes first, and who gives way."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.fakes.integrity import check_integrity
from tests.scheduler.harness import Engine, answer, make_scheduler, request, step

from quire.config import OrderKind
from quire.request import Deadline, FinishReason, Request
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.settings import PolicyChange


def entries(scheduler: Scheduler) -> list[str]:
    """Run to the end and return the requests in the order in which they ended; one at a time, that of entry."""
    order = []
    while scheduler.has_work:
        order += [e.request_id for e in step(scheduler) if e.finish_reason is not None]
    return order


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("fcfs", "abcd"),
        ("priority", "bdac"),
        ("shortest-first", "dbac"),
        ("longest-prefix", "abcd"),
    ],
)
def test_the_order_of_entry(order: OrderKind, expected: str) -> None:
    scheduler = make_scheduler(order=order, max_num_seqs=1)
    scheduler.add(request("a", 20, arrival_s=0.0, priority=3), 0.0)
    scheduler.add(request("c", 30, arrival_s=2.0, priority=3), 0.0)
    scheduler.add(request("b", 9, arrival_s=1.0, priority=0), 0.0)
    scheduler.add(request("d", 5, arrival_s=3.0, priority=1), 0.0)
    assert entries(scheduler) == list(expected)


def test_low_priority_does_not_starve() -> None:
    """One seat, and a request of high priority per second as long as one takes: the load never ends."""
    scheduler = make_scheduler(order="priority", max_num_seqs=1, max_queue=1000)
    scheduler.add(request("low", priority=2, max_tokens=1), 0.0)
    done: list[str] = []
    for second in range(100):
        scheduler.add(request(f"h{second}", arrival_s=float(second), max_tokens=1), float(second))
        done += [event.request_id for event in step(scheduler, float(second)) if event.finish_reason]
    # Two steps of priority are 60 seconds: what arrives later comes behind.
    assert done.index("low") == 61
    assert done[:61] == [f"h{second}" for second in range(61)]


def test_priorities_beyond_the_limit_break_ties() -> None:
    scheduler = make_scheduler(order="priority", max_num_seqs=1)
    for name, priority in (("least", 2**40), ("less", 2000), ("most", -(2**60)), ("more", -2000)):
        scheduler.add(request(name, priority=priority), 0.0)
    assert entries(scheduler) == ["most", "more", "less", "least"]


def test_longest_prefix_takes_what_is_cached() -> None:
    scheduler = make_scheduler(order="longest-prefix", max_num_seqs=1)
    shared = list(range(100, 120))
    scheduler.add(request("first", shared), 0.0)
    entries(scheduler)
    scheduler.add(request("other", 20, arrival_s=1.0), 0.0)
    scheduler.add(request("some", [*shared[:8], 1, 2, 3], arrival_s=2.0), 0.0)
    scheduler.add(request("most", [*shared[:16], 1, 2, 3], arrival_s=3.0), 0.0)
    assert entries(scheduler) == ["most", "some", "other"]


def test_the_last_in_rank_is_preempted() -> None:
    scheduler = make_scheduler(num_blocks=8, order="priority", caching=False)
    scheduler.add(request("low", 8, priority=5, max_tokens=12), 0.0)
    scheduler.add(request("high", 8, priority=1, max_tokens=12), 0.0)
    preempted = {}
    while scheduler.has_work:
        for event in step(scheduler):
            if event.timing is not None:
                preempted[event.request_id] = event.timing.num_preemptions
    assert preempted["high"] == 0
    assert preempted["low"] >= 1


def test_a_change_of_order_reorders_those_who_wait() -> None:
    scheduler = make_scheduler(order="fcfs", max_num_seqs=1)
    scheduler.add(request("a", 20, arrival_s=0.0, priority=3), 0.0)
    scheduler.add(request("b", 20, arrival_s=1.0, priority=2), 0.0)
    scheduler.add(request("c", 20, arrival_s=2.0, priority=1), 0.0)
    step(scheduler)
    scheduler.change_policy(PolicyChange(order="priority"))
    assert entries(scheduler) == ["a", "c", "b"]


def due(one: Request, first_s: float | None = None, total_s: float | None = None) -> Request:
    return replace(one, terms=replace(one.terms, deadline=Deadline(first_s, total_s)))


def paced(**config: object) -> Engine:
    """An engine of one seat whose steps have taken 0.01 s; "running" holds the seat."""
    engine = Engine(make_scheduler(order="deadline", max_num_seqs=1, **config), in_flight=2)
    engine.put([request("running", max_tokens=12)])
    for _ in range(4):
        engine.step()
    return engine


def test_the_earliest_deadline_enters_first() -> None:
    engine = paced()
    now = engine.clock.now()
    engine.put(
        [
            request("none", arrival_s=now),
            due(request("late", arrival_s=now), first_s=9.0),
            due(request("soon", arrival_s=now), total_s=5.0),
            due(request("then", arrival_s=now), first_s=7.0, total_s=20.0),
            request("old", arrival_s=now - 54.0),
        ]
    )
    engine.run()
    ends = sorted(
        ["soon", "then", "late", "none", "old"], key=lambda name: engine.end(name).timing.queued_s % 54
    )
    assert ends == ["soon", "old", "then", "late", "none"]


def test_a_request_that_must_miss_takes_no_place() -> None:
    engine = paced()
    now = engine.clock.now()
    engine.put([due(request("must miss", max_tokens=30, arrival_s=now), total_s=0.45)])
    engine.step()
    engine.put(
        [
            due(request("before", max_tokens=16, arrival_s=now), first_s=0.3),
            due(request("can", arrival_s=now), first_s=0.6),
        ]
    )
    engine.run()
    assert engine.end("can").finish_reason is FinishReason.LENGTH
    assert engine.end("must miss").finish_reason is FinishReason.DEADLINE
    assert engine.end("can").timing.queued_s < 0.35, "it entered first, though its limit is later"


def test_late_sequences_are_preempted_first() -> None:
    scheduler = make_scheduler(num_blocks=8, order="deadline", caching=False)
    scheduler.add(due(request("late", 8, max_tokens=12), total_s=3.3), 0.0)
    scheduler.add(due(request("fine", 8, max_tokens=12), total_s=50.0), 0.0)
    now, preempted = 0.0, {}
    while scheduler.has_work:
        plan = scheduler.plan(now)
        now += 0.3
        if plan is not None:
            for event in scheduler.apply(answer(scheduler, plan), now):
                if event.timing is not None:
                    preempted[event.request_id] = event.timing.num_preemptions
        preempted |= {e.request_id: e.timing.num_preemptions for e in scheduler.expire(now) if e.timing}
        check_integrity(scheduler)
    assert preempted == {"late": 1, "fine": 0}
