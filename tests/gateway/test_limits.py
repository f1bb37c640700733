"""Limits: one set of rules, the same decisions from memory and from Redis."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from tests.gateway.services import Redis, redis_server

from quire.clock import VirtualClock, WallClock
from quire_gateway import redis_store
from quire_gateway.limits import LEASE_S, Charge, Limits, LimitTable, MemoryStore, limit_headers
from quire_gateway.quotas import Limit, Quota, Unit, Usage
from quire_gateway.redis_store import RedisStore

NOON = datetime(2026, 11, 22, 12, tzinfo=UTC).timestamp()


@pytest.fixture(scope="module")
def redis() -> Iterator[Redis]:
    with redis_server() as server:
        yield server


class Books:
    """Limits in memory whose time the test moves."""

    def __init__(self, **limits: Limit) -> None:
        self.clock = VirtualClock()
        self.wall_s = NOON
        table = LimitTable(
            default=limits.get("default", Limit()),
            tenants={"lab": limits["tenant"]} if "tenant" in limits else {},
            models={"big": limits["model"]} if "model" in limits else {},
        )
        self.limits = Limits(table, MemoryStore(self.clock, lambda: self.wall_s), lambda: self.wall_s)
        self._next = 0

    def reserve(
        self, input_tokens: int = 0, output_tokens: int = 0, *, key: str = "alice", model: str = "big"
    ):  # type: ignore[no-untyped-def]
        self._next += 1
        usage = Usage(input_tokens, output_tokens)
        return asyncio.run(self.limits.reserve(f"r{self._next}", key, "lab", model, usage))

    def settle(self, reservation, used: Usage | None) -> None:  # type: ignore[no-untyped-def]
        asyncio.run(self.limits.settle(reservation, used))


def test_requests_per_minute_come_back_evenly() -> None:
    books = Books(default=Limit(requests_per_minute=6))
    assert all(books.reserve()[0] for _ in range(6))
    denied, decision = books.reserve()
    assert denied is None
    assert decision.denied is not None
    assert decision.denied.name == "key/alice/requests_per_minute"
    assert decision.retry_after_s == pytest.approx(10.0)
    books.clock.advance(10.0)
    assert books.reserve()[0]
    assert not books.reserve()[0]


def test_unused_tokens_return_at_settlement() -> None:
    books = Books(default=Limit(tokens_per_minute=1000))
    held, _ = books.reserve(100, 900)
    assert not books.reserve(1)[0]
    books.settle(held, Usage(100, 50))
    again, decision = books.reserve(850)
    assert again
    assert decision.allowances[0].remaining == 0


def test_untouched_model_costs_nothing() -> None:
    books = Books(default=Limit(requests_per_minute=1, tokens_per_day=10))
    held, _ = books.reserve(5, 5)
    books.settle(held, None)
    assert books.reserve(5, 5)[0]


def test_one_full_quota_takes_nothing_from_others() -> None:
    books = Books(default=Limit(requests_per_minute=100), tenant=Limit(tokens_per_minute=10))
    assert books.reserve(10)[0]
    for _ in range(5):
        assert books.reserve(1)[1].denied.name == "tenant/lab/tokens_per_minute"
    books.clock.advance(60.0)
    assert books.reserve(0)[1].allowances[0].remaining == 99


def test_the_time_to_come_back_is_that_of_the_request() -> None:
    """A larger request waits longer, and is granted at the time told, not before."""
    books = Books(default=Limit(tokens_per_minute=600))
    assert books.reserve(500, 0)[0] is not None
    small, large = books.reserve(110, 40)[1], books.reserve(300, 100)[1]
    assert small.retry_after_s == pytest.approx(5.0)
    assert large.retry_after_s == pytest.approx(30.0)
    books.clock.advance(29.9)
    assert books.reserve(300, 100)[0] is None
    books.clock.advance(0.2)
    assert books.reserve(300, 100)[0] is not None


def test_a_lease_lasts_while_it_is_renewed() -> None:
    books = Books(default=Limit(concurrent_requests=1))
    first, _ = books.reserve()
    for _ in range(4):
        books.clock.advance(0.75 * LEASE_S)
        asyncio.run(books.limits.renew())
        assert books.reserve()[0] is None
    books.settle(first, None)
    assert books.reserve()[0] is not None


def test_a_budget_is_charged_what_was_used_and_once() -> None:
    books = Books(default=Limit(tokens_per_day=1000))
    first, _ = books.reserve(100, 500)
    books.settle(first, Usage(100, 50))
    assert books.reserve(0, 850)[0] is not None
    assert books.reserve(0, 1)[0] is None


def test_larger_than_quota_is_never_granted() -> None:
    _, decision = Books(default=Limit(tokens_per_minute=10)).reserve(11)
    assert math.isinf(decision.retry_after_s)


def test_concurrent_requests_end_with_settlement_or_lease() -> None:
    books = Books(default=Limit(concurrent_requests=2))
    first, _ = books.reserve()
    assert books.reserve()[0]
    assert books.reserve()[1].retry_after_s == 1.0
    books.settle(first, Usage())
    assert books.reserve()[0]
    books.clock.advance(LEASE_S / 2)
    asyncio.run(books.limits.renew())
    books.clock.advance(LEASE_S / 2 + 1)
    assert not books.reserve()[0], "renewed leases still count"
    books.clock.advance(LEASE_S)
    assert books.reserve()[0], "the leases of a gateway that died end"


def test_budgets_follow_the_calendar() -> None:
    books = Books(default=Limit(tokens_per_day=100, money_per_month=1.0))
    assert books.reserve(60, 40)[0]
    _, decision = books.reserve(1)
    assert decision.retry_after_s == 12 * 3600
    books.wall_s += 12 * 3600
    assert books.reserve(100)[0]


def test_a_settlement_goes_to_the_day_of_its_start() -> None:
    books = Books(default=Limit(tokens_per_day=100))
    held, _ = books.reserve(10, 90)
    books.wall_s += 86_400
    assert books.reserve(100)[0]
    books.settle(held, Usage(10, 10))
    assert not books.reserve(1)[0], "the new day is as full as before"


def test_clock_jumps_do_not_refill_rates() -> None:
    books = Books(default=Limit(requests_per_minute=1))
    assert books.reserve()[0]
    books.wall_s += 3600
    assert not books.reserve()[0]
    books.wall_s -= 7200
    assert not books.reserve()[0]


def test_quotas_of_key_tenant_and_model_add_up() -> None:
    books = Books(
        default=Limit(requests_per_minute=9),
        tenant=Limit(requests_per_minute=3),
        model=Limit(requests_per_minute=2),
    )
    assert [bool(books.reserve(model="big")[0]) for _ in range(3)] == [True, True, False]
    assert [bool(books.reserve(model="small", key="bob")[0]) for _ in range(2)] == [True, False]


def test_headers_name_the_tightest_quota() -> None:
    books = Books(
        default=Limit(requests_per_minute=60, tokens_per_minute=600), tenant=Limit(requests_per_minute=30)
    )
    headers = dict(limit_headers(books.reserve(60)[1].allowances))
    assert headers[b"x-ratelimit-limit-requests"] == b"30"
    assert headers[b"x-ratelimit-remaining-requests"] == b"29"
    assert headers[b"x-ratelimit-remaining-tokens"] == b"540"
    assert headers[b"x-ratelimit-reset-tokens"] == b"6.000s"


QUOTAS = [
    Quota("k/requests_per_minute", Unit.REQUESTS, "minute", 20),
    Quota("k/tokens_per_minute", Unit.TOKENS, "minute", 100_000),
    Quota("k/concurrent_requests", Unit.REQUESTS, "concurrent", 5),
    Quota("k/tokens_per_day", Unit.TOKENS, "day", 3_000),
]


def test_redis_and_memory_decide_alike(redis: Redis) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)

    async def both() -> int:
        own = MemoryStore(VirtualClock())
        shared = RedisStore(redis.url, WallClock(), prefix=f"alike-{seed}")
        open_: dict[str, list[Charge]] = {}
        denied = 0
        for step in range(300):
            if open_ and rng.random() < 0.4:
                name = rng.choice(list(open_))
                charges = open_.pop(name)
                used = [rng.randrange(c.amount + 5) for c in charges]
                await own.settle(name, charges, used)
                await shared.settle(name, charges, used)
                continue
            some = rng.sample(QUOTAS, rng.randint(1, 4))
            charges = [
                Charge(q, q.key(NOON), 1 if q.unit is Unit.REQUESTS else rng.randrange(200)) for q in some
            ]
            a = await own.take(f"r{step}", charges)
            b = await shared.take(f"r{step}", charges)
            assert (a.denied is None) == (b.denied is None), (step, a, b)
            denied += a.denied is not None
            if a.denied is None:
                open_[f"r{step}"] = charges
        await shared.close()
        return denied

    assert asyncio.run(both()) > 20


def test_two_gateways_share_one_quota(redis: Redis) -> None:
    async def run() -> int:
        gateways = [RedisStore(redis.url, WallClock(), prefix="shared") for _ in range(3)]
        quota = Quota("k/tokens_per_day", Unit.TOKENS, "day", 1000)

        async def ask(number: int) -> bool:
            charge = Charge(quota, quota.key(NOON), 10)
            return (await gateways[number % 3].take(f"r{number}", [charge])).denied is None

        granted = sum(await asyncio.gather(*(ask(i) for i in range(200))))
        for each in gateways:
            await each.close()
        return granted

    assert asyncio.run(run()) == 100


def test_requests_go_on_while_redis_is_gone() -> None:
    with redis_server() as redis:
        asyncio.run(_without_redis(redis))


async def _without_redis(redis: Redis) -> None:
    clock = VirtualClock()
    store = RedisStore(redis.url, clock)
    quota = Quota("k/tokens_per_day", Unit.TOKENS, "day", 100)
    charge = Charge(quota, quota.key(NOON), 60)
    assert (await store.take("a", [charge])).denied is None
    redis.kill()
    assert (await store.take("b", [charge])).denied is None, "this gateway alone has granted nothing yet"
    assert store.is_degraded
    assert (await store.take("c", [charge])).denied is quota
    await store.settle("b", [charge], [50])
    redis.start()  # empty: what it held is lost, as with a Redis that keeps nothing
    clock.advance(5.0)
    decision = await store.take("d", [Charge(quota, charge.key, 50)])
    assert not store.is_degraded
    assert decision.denied is None
    assert decision.allowances[0].remaining == 0, "the 50 tokens of request b were brought to Redis"
    await store.close()


DAY = Quota("k/tokens_per_day", Unit.TOKENS, "day", 1_000)


def test_a_killed_gateways_reservations_are_given_back(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_store, "LEASE_S", 2.0)
    lives, dies, books = Charge(DAY, DAY.key(NOON), 300), Charge(DAY, DAY.key(NOON), 700), DAY.key(NOON)

    async def left(store: RedisStore) -> int:
        return (await store.take("", [Charge(DAY, books, 0)])).allowances[0].remaining

    async def run() -> None:
        killed, other = (RedisStore(redis.url, WallClock(), prefix="killed") for _ in range(2))
        assert (await killed.take("dies", [dies])).denied is None
        assert (await other.take("lives", [lives])).denied is None
        assert await left(other) == 0
        async with asyncio.timeout(60):
            while await left(other) != 700:
                await other.renew([("lives", lives)])
                await asyncio.sleep(0.1)
        await other.settle("lives", [lives], [100])
        assert await left(other) == 900
        await other.recover("dies", [Charge(DAY, books, 0)], [50], if_held=False)  # it has started again
        await other.recover("dies", [Charge(DAY, books, 0)], [50], if_held=True)
        assert await left(other) == 850
        await killed.close()
        await other.close()

    asyncio.run(run())


def test_a_recovered_request_is_charged_once(redis: Redis) -> None:
    async def run() -> None:
        store, charge = RedisStore(redis.url, WallClock(), prefix="once"), Charge(DAY, DAY.key(NOON), 600)
        none = Charge(DAY, charge.key, 0)
        assert (await store.take("a", [charge])).denied is None
        await store.recover("a", [none], [40], if_held=True)  # the lease has not ended
        assert (await store.take("", [none])).allowances[0].remaining == 960
        assert (await store.take("b", [charge])).denied is None
        await store.settle("b", [charge], [60])
        await store.recover("b", [none], [60], if_held=True)  # it was settled before the kill
        assert (await store.take("", [none])).allowances[0].remaining == 900
        await store.close()

    asyncio.run(run())


def test_settlements_wait_for_redis() -> None:
    with redis_server() as redis:
        asyncio.run(_settled_late(redis))


async def _settled_late(redis: Redis) -> None:
    clock = VirtualClock()
    store, charge = RedisStore(redis.url, clock), Charge(DAY, DAY.key(NOON), 600)
    assert (await store.take("a", [charge])).denied is None
    redis.kill()
    await store.settle("a", [charge], [150])
    assert store.is_degraded
    redis.start()
    clock.advance(5.0)
    assert (await store.take("", [Charge(DAY, charge.key, 0)])).allowances[0].remaining == 850
    await store.close()
