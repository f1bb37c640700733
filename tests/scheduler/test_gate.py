"""When sequences may enter: static, dynamic, continuous."""

from __future__ import annotations

from tests.scheduler.harness import make_scheduler, request, step

from quire.scheduler.scheduler import Sleep, Step


def test_continuous_lets_newcomers_join() -> None:
    scheduler = make_scheduler(gate="continuous")
    scheduler.add(request("a"), 0.0)
    step(scheduler)
    scheduler.add(request("b"), 0.0)
    step(scheduler)
    assert scheduler.stats().num_running == 2


def test_static_lets_nobody_join_a_batch() -> None:
    scheduler = make_scheduler(gate="static", max_num_seqs=2)
    for name in "abc":
        scheduler.add(request(name, max_tokens=3), 0.0)
    running = []
    while scheduler.has_work:
        step(scheduler)
        running.append((scheduler.stats().num_running, scheduler.stats().num_waiting))
    assert running == [(2, 1), (2, 1), (0, 1), (1, 0), (1, 0), (0, 0)]


def test_static_fills_its_batch_over_several_steps() -> None:
    """The members are counted when the batch starts, though the rows of a step do not take all of them."""
    scheduler = make_scheduler(gate="static", max_num_batched_tokens=8)
    for name in "abc":
        scheduler.add(request(name, 8, max_tokens=9), 0.0)
    step(scheduler)
    scheduler.add(request("late"), 0.0)
    for _ in range(6):
        step(scheduler)
    assert (scheduler.stats().num_running, scheduler.stats().num_waiting) == (3, 1)


def test_static_takes_a_preempted_member_back() -> None:
    scheduler = make_scheduler(num_blocks=6, gate="static", max_num_seqs=2, caching=False)
    scheduler.add(request("a", 8, max_tokens=12), 0.0)
    scheduler.add(request("b", 8, max_tokens=12), 0.0)
    step(scheduler)
    scheduler.add(request("late", 8, max_tokens=2), 0.0)
    order = []
    while scheduler.has_work:
        order += [e.request_id for e in step(scheduler) if e.finish_reason is not None]
    assert order == ["a", "b", "late"]
    assert scheduler.stats().num_preemptions > 0


def test_dynamic_waits_for_a_full_batch_or_for_its_oldest() -> None:
    scheduler = make_scheduler(gate="dynamic", max_num_seqs=3, dynamic_max_wait_s=1.0)
    scheduler.add(request("a", arrival_s=0.0), 0.0)
    scheduler.add(request("b", arrival_s=0.5), 0.5)
    assert scheduler.plan(0.9) is None
    assert scheduler.next_action(0.9) == Sleep(1.0)
    step(scheduler, 1.0)
    assert scheduler.stats().num_running == 2
    assert isinstance(scheduler.next_action(1.0), Step)


def test_dynamic_starts_at_once_when_full() -> None:
    scheduler = make_scheduler(gate="dynamic", max_num_seqs=2, dynamic_max_wait_s=100.0)
    scheduler.add(request("a"), 0.0)
    assert scheduler.plan(0.0) is None
    scheduler.add(request("b"), 0.0)
    step(scheduler, 0.0)
    assert scheduler.stats().num_running == 2
