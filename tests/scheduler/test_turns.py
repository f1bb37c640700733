"""Decodes that do not all fit a step take turns; queue, order and shares hold to the unit."""

from __future__ import annotations

from dataclasses import replace

from tests.scheduler.harness import answer, make_scheduler, request, rows_of, step

from quire.request import Deadline, Tenant, Terms
from quire.scheduler.policies.fair import DECODE, RESIDENCY
from quire.scheduler.policies.order import AGING_S
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.settings import PolicyChange


def ends(scheduler: Scheduler, now: float = 0.0) -> list[str]:
    """Run to the end; return the requests in the order of their ends."""
    order: list[str] = []
    while scheduler.has_work:
        order += [event.request_id for event in step(scheduler, now) if event.finish_reason is not None]
    return order


def test_decodes_that_do_not_fit_take_turns() -> None:
    scheduler = make_scheduler(num_blocks=256)
    for i in range(6):
        scheduler.add(request(f"r{i}", 4, max_tokens=30), 0.0)
    step(scheduler)
    scheduler.change_policy(PolicyChange(max_num_batched_tokens=2))
    chosen = []
    for _ in range(6):
        plan = scheduler.plan(0.0)
        assert plan is not None
        chosen.append(set(rows_of(plan)))
        scheduler.apply(answer(scheduler, plan), 0.0)
    assert chosen == [{0, 1}, {2, 3}, {4, 5}] * 2


def test_a_preempted_sequence_is_before_later_arrivals() -> None:
    scheduler = make_scheduler(num_blocks=8, max_num_seqs=2, caching=False)
    scheduler.add(request("first", 8, arrival_s=0.0, max_tokens=12), 0.0)
    scheduler.add(request("second", 8, arrival_s=1.0, max_tokens=12), 1.0)
    while not scheduler.stats().num_preemptions:
        step(scheduler, 2.0)
    scheduler.add(request("third", 4, arrival_s=2.0, max_tokens=1), 2.0)
    assert [seq.request_id for seq in scheduler.state.waiting] == ["second", "third"]


def test_a_prompt_is_charged_once_to_its_tenant() -> None:
    scheduler = make_scheduler(num_blocks=7, max_num_seqs=2, order="fair", caching=False)
    tenant = Tenant("t", 2.0)
    for name in ("a", "b"):
        scheduler.add(replace(request(name, 8, max_tokens=12), terms=Terms(tenant)), 0.0)
    step(scheduler)
    served = scheduler.state.policies.turn_on("fair").shares.served
    assert served[tenant] == 2 * 8 / tenant.weight
    before = served[tenant]
    while not scheduler.stats().num_preemptions:
        step(scheduler)
        assert served[tenant] == before  # outputs are counted when an order is asked for, or at an end
    ends(scheduler)
    dearest = DECODE + RESIDENCY * (8 + 12)  # the last output token; a prompt charged twice would cost 8 more
    outputs = (served[tenant] - before) * tenant.weight
    assert 2 * 12 * DECODE < outputs <= 2 * 12 * dearest < 2 * 12 * DECODE + 8


def test_a_step_of_priority_is_worth_half_a_minute() -> None:
    scheduler = make_scheduler(max_num_seqs=1, order="priority")
    scheduler.add(request("old", priority=1, arrival_s=0.0), 0.0)
    scheduler.add(request("before", priority=0, arrival_s=AGING_S - 1.0), AGING_S)
    scheduler.add(request("after", priority=0, arrival_s=AGING_S + 1.0), AGING_S + 1.0)
    assert ends(scheduler, AGING_S + 1.0) == ["before", "old", "after"]


def test_the_first_of_two_limits_ranks_a_deadline() -> None:
    scheduler = make_scheduler(max_num_seqs=1, order="deadline")
    for name, limit in (
        ("total", Deadline(None, 9.0)),
        ("both", Deadline(5.0, 20.0)),
        ("first", Deadline(7.0)),
    ):
        scheduler.add(replace(request(name), terms=Terms(deadline=limit)), 0.0)
    assert ends(scheduler) == ["both", "first", "total"]


def test_the_queue_holds_as_many_as_its_bound() -> None:
    scheduler = make_scheduler(max_queue=3)
    kinds = [[event.error_kind for event in scheduler.add(request(f"r{i}"), 0.0)] for i in range(5)]
    assert kinds == [[], [], [], ["capacity"], ["capacity"]]
