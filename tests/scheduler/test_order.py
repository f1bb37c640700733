"""Who comes first, and who gives way."""

from __future__ import annotations

import pytest
from tests.scheduler.harness import make_scheduler, request, step

from quire.config import OrderKind
from quire.scheduler.policy import PolicyChange
from quire.scheduler.scheduler import Scheduler


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
