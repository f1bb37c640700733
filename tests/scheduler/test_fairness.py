"""The order "fair": service by weight, whoever floods, with a bound on the difference."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from tests.fakes.integrity import check_integrity
from tests.scheduler.harness import make_scheduler, request, step

from quire.request import Request, Tenant
from quire.scheduler.policies.fair import DECODE, MAX_IDLE_TENANTS, RESIDENCY, FairShares
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.settings import PolicyChange


def of(tenant: str, one: Request, weight: float = 1.0) -> Request:
    return replace(one, terms=replace(one.terms, tenant=Tenant(tenant, weight)))


def ended(scheduler: Scheduler, num_requests: int) -> list[str]:
    """Run until so many requests have ended; return them in that order."""
    order: list[str] = []
    while len(order) < num_requests and scheduler.has_work:
        order += [e.request_id for e in step(scheduler) if e.finish_reason is not None]
    return order


def test_a_flood_does_not_hold_another_tenant_back() -> None:
    scheduler = make_scheduler(order="fair", max_num_seqs=1)
    for i in range(50):
        scheduler.add(of("flood", request(f"f{i:02}", arrival_s=0.0)), 0.0)
    for i in range(5):
        scheduler.add(of("calm", request(f"c{i}", arrival_s=1.0)), 1.0)
    assert Counter(each[0] for each in ended(scheduler, 11))["c"] == 5


def test_service_follows_the_weights() -> None:
    scheduler = make_scheduler(order="fair", max_num_seqs=4, num_blocks=256, max_queue=1000, caching=False)
    for i in range(200):
        scheduler.add(of("one", request(f"a{i}", arrival_s=0.0)), 0.0)
        scheduler.add(of("three", request(f"b{i}", arrival_s=0.0), 3.0), 0.0)
    done = Counter(each[0] for each in ended(scheduler, 120))
    assert 2.6 < done["b"] / done["a"] < 3.4


def test_idle_time_is_not_saved_up() -> None:
    scheduler = make_scheduler(order="fair", max_num_seqs=1)
    scheduler.add(of("late", request("first", arrival_s=0.0)), 0.0)
    ended(scheduler, 1)
    for i in range(40):
        scheduler.add(of("busy", request(f"b{i:02}", arrival_s=1.0)), 1.0)
    ended(scheduler, 20)
    for i in range(20):
        scheduler.add(of("late", request(f"l{i:02}", arrival_s=2.0)), 2.0)
    done = Counter(each[0] for each in ended(scheduler, 20))
    assert 8 <= done["l"] <= 12, done


def test_cached_prompts_cost_less() -> None:
    scheduler = make_scheduler(order="fair", max_num_seqs=1, num_blocks=256)
    shared = list(range(100, 132))
    scheduler.add(of("warm", request("w", shared)), 0.0)
    ended(scheduler, 1)
    for i in range(30):
        scheduler.add(of("warm", request(f"w{i}", [*shared, 1], arrival_s=1.0)), 1.0)
        scheduler.add(of("cold", request(f"c{i}", 33, arrival_s=1.0)), 1.0)
    done = Counter(each[0] for each in ended(scheduler, 30))
    assert done["w"] > 1.5 * done["c"]


def test_a_change_to_fair_keeps_what_was_counted() -> None:
    scheduler = make_scheduler(order="fcfs", max_num_seqs=1)
    for i in range(10):
        scheduler.add(of("early", request(f"e{i}", arrival_s=0.0)), 0.0)
    for i in range(4):
        scheduler.add(of("late", request(f"l{i}", arrival_s=1.0)), 1.0)
    assert ended(scheduler, 4) == ["e0", "e1", "e2", "e3"]
    scheduler.change_policy(PolicyChange(order="fair"))
    assert Counter(each[0] for each in ended(scheduler, 6))["l"] >= 3


def test_backlogged_tenants_differ_by_a_bound() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    longest, most, seats = 24, 8, 4
    scheduler = make_scheduler(order="fair", max_num_seqs=seats, num_blocks=256, max_queue=10_000)
    weights = {"a": 1.0, "b": 2.0, "c": 0.5}
    for i in range(300):
        tenant = rng.choice("abc")
        one = request(f"{tenant}{i}", rng.randint(1, longest), max_tokens=rng.randint(1, most))
        scheduler.add(of(tenant, one, weights[tenant]), 0.0)
    # What one tenant may be ahead by: its requests that run, each with all that it can cost.
    one = longest + most * (DECODE + RESIDENCY * (longest + most))
    bound = (seats + 1) * one / min(weights.values())
    shares = scheduler.state.policies.turn_on("fair").shares
    while len(scheduler.state.waiting.by_tenant) == 3:
        step(scheduler)
        check_integrity(scheduler)
        served = [shares.served[Tenant(*each)] for each in weights.items()]
        assert max(served) - min(served) <= bound
    while scheduler.has_work:
        step(scheduler)
    assert not shares.at_work
    assert not scheduler.state.waiting.by_tenant


def test_tenants_that_left_do_not_pile_up() -> None:
    scheduler = make_scheduler(order="fair", max_num_seqs=1)
    shares = scheduler.state.policies.turn_on("fair").shares
    assert isinstance(shares, FairShares)
    for i in range(MAX_IDLE_TENANTS + 50):
        shares.served[Tenant(f"t{i}")] = 0.0
    for i in range(100):
        scheduler.add(of(f"x{i}", request(f"r{i}", max_tokens=1)), 0.0)
        ended(scheduler, 1)
    assert len(shares.served) <= MAX_IDLE_TENANTS + 50
