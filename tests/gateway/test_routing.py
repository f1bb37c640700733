"""Routing: each policy's choice, the bound on load, and the three indexes against brute force."""

from __future__ import annotations

import math
import random

import pytest
from tests.scheduler.harness import make_scheduler, request, step

from quire.cache.events import BlockRemoved, BlockStored, EventBuffer, EventsLost
from quire.cache.prefix_cache import extend_chain, root_hash
from quire.errors import ConfigError
from quire.scheduler.scheduler import Scheduler
from quire_gateway.prefix_index import TICKS_TO_LIVE, Holders, PendingIndex, PredictedIndex, ReportedIndex
from quire_gateway.routing import POLICIES, Demand, Router
from quire_gateway.ttft import TtftModel


def chain(*names: int) -> list[bytes]:
    """A made-up chain: each hash names everything before it."""
    return [bytes(names[: i + 1]) for i in range(len(names))]


def test_only_a_pace_that_differs_much_is_a_replicas_own() -> None:
    model, rng = TtftModel(), random.Random(4)
    for _ in range(200):
        for replica, factor in enumerate((0.8, 1.0, 1.0, 1.0, 1.2, 3.2)):
            tokens = rng.randrange(100, 4000)
            model.observe(replica, tokens, factor * (0.02 + 1e-4 * tokens) * rng.uniform(0.7, 1.4))
    same = {model.pace_s(replica) for replica in range(5)}
    assert len(same) == 1
    assert 2 * same.pop() <= model.pace_s(5)
    model.forget(5)
    assert model.pace_s(5) == model.pace_s(0)


def test_depths_against_brute_force() -> None:
    rng = random.Random(1)
    for _ in range(200):
        num, holders, held = rng.randint(1, 70), Holders(), {}
        links = chain(*(rng.randrange(4) for _ in range(rng.randint(0, 9))))
        for replica in range(num):
            held[replica] = {h for h in links if rng.random() < 0.8}
            for h in held[replica]:
                holders.add(h, replica)
        expected = [
            next((i for i, h in enumerate(links) if h not in held[r]), len(links)) for r in range(num)
        ]
        assert holders.depths(links, num) == expected
        for replica in range(num):
            for h in links:
                holders.remove(h, replica)
        assert len(holders) == 0


def test_round_robin_and_least_loaded() -> None:
    router = Router("round-robin", 3)
    assert [router.route(str(i)) for i in range(5)] == [0, 1, 2, 0, 1]
    router = Router("least-loaded", 3)
    assert [router.route(str(i)) for i in range(4)] == [0, 1, 2, 0]
    router.finished("1")
    assert router.route("4") == 1
    assert [load.requests for load in router.loads] == [2, 1, 1]


def test_random_is_the_seed_s() -> None:
    def choices(seed: int) -> list[int | None]:
        router = Router("random", 5, seed=seed)
        return [router.route(str(i)) for i in range(40)]

    assert choices(7) == choices(7)
    assert choices(7) != choices(8)
    assert set(choices(7)) == set(range(5))


def test_a_prefix_goes_where_it_was_sent() -> None:
    router = Router("prefix-predicted", 4, max_load_ratio=4.0)
    first = router.route("a", Demand(chain(1, 2, 3)))
    other = router.route("b", Demand(chain(9, 9)))
    assert other != first
    assert router.route("c", Demand(chain(1, 2, 7))) == first
    assert router.route("d", Demand(chain(9, 9, 9))) == other


def test_one_running_request_takes_no_prefix_away() -> None:
    for policy in ("session", "prefix-hash", "prefix-predicted"):
        router = Router(policy, 4)
        first = router.route("a", Demand(chain(1, 2, 3)))
        assert router.route("b", Demand(chain(1, 2, 3))) == first, policy
        assert router.route("c", Demand(chain(1, 2, 3))) != first, policy


def test_a_prefix_never_overloads_a_replica() -> None:
    rng, ratio = random.Random(2), 1.25
    for policy in POLICIES[POLICIES.index("session") :]:
        router = Router(policy, 4, max_load_ratio=ratio)
        open_ids: list[str] = []
        for i in range(400):
            replica = router.route(str(i), Demand(chain(1, 2, 3)))  # everybody has the same prefix
            assert replica is not None
            open_ids.append(str(i))
            mean = len(open_ids) / 4
            bound = max(math.ceil(ratio * mean), math.ceil(mean) + 1)
            assert router.loads[replica].requests <= bound
            while open_ids and rng.random() < 0.45:
                router.finished(open_ids.pop(rng.randrange(len(open_ids))))
        assert sum(load.requests for load in router.loads) == len(open_ids)


def test_hybrid_knows_what_is_on_its_way() -> None:
    hybrid, reported = (
        Router("prefix-hybrid", 3, max_load_ratio=3.0),
        Router("prefix-reported", 3, max_load_ratio=3.0),
    )
    for router, same in ((hybrid, True), (reported, False)):
        first = router.route("a", Demand(chain(1, 2)))
        assert first is not None
        assert (router.route("b", Demand(chain(1, 2))) == first) is same
        router.started("a")
        router.started("b")
        other = (first + 2) % 3
        assert router.prefixes.report(other, [BlockStored(chain(1)[0], b"", (), (0,))])
        assert router.route("c", Demand(chain(1, 2))) == other  # nothing is on its way, and the report counts


def test_a_lost_replica_gives_its_requests_back() -> None:
    for policy in POLICIES:
        router = Router(policy, 2, max_load_ratio=2.0)
        placed = {str(i): router.route(str(i), Demand(chain(i % 2, 5))) for i in range(6)}
        lost = router.lose(0)
        assert lost == [i for i, replica in placed.items() if replica == 0]
        assert router.loads[0].requests == 0
        assert all(router.route(i, Demand(chain(1, 5))) == 1 for i in lost)
        assert router.lose(1)
        assert router.route("x") is None
        router.revive(0)
        assert router.route("x", Demand(chain(1, 5))) == 0


def test_predicted_index_evicts_the_least_recently_used_end() -> None:
    index = PredictedIndex(4)
    index.sent(0, chain(1, 2, 3))
    index.sent(0, chain(7, 8))  # five blocks: the deepest of the older chain goes
    assert index.holders.depths(chain(1, 2, 3), 1) == [2]
    assert index.holders.depths(chain(7, 8), 1) == [2]
    index.forget(0)
    assert index.holders.depths(chain(7, 8), 1) == [0]


def test_pending_index_counts() -> None:
    index = PendingIndex()
    index.sent(1, chain(1, 2))
    index.sent(1, chain(1, 3))
    index.arrived(1, chain(1, 2))
    assert index.holders.depths(chain(1, 2), 2) == [0, 1]
    index.arrived(1, chain(1, 3))
    assert index.holders.depths(chain(1), 2) == [0, 0]


def test_reported_index_follows_groups_losses_and_snapshots() -> None:
    index = ReportedIndex()
    a, b = chain(1, 2)
    assert index.apply(0, [BlockStored(a, b"", (), (0, 1)), BlockStored(b, a, (), (0, 1))])
    assert index.apply(0, [BlockRemoved(b, (1,))])
    assert index.holders.depths([a, b], 1) == [2]
    assert index.apply(0, [BlockRemoved(b, (0,))])
    assert index.holders.depths([a, b], 1) == [1]
    assert not index.apply(0, [EventsLost(3), BlockStored(b, a, (), (0,))])
    index.replace(0, [BlockStored(b, a, (), (0,))])
    assert index.holders.depths([a, b], 1) == [0]


def test_reports_of_a_real_cache_agree_with_what_it_matches() -> None:
    """A scheduler's events, drained at odd times, against its own prefix tree."""
    rng = random.Random(4)
    scheduler = make_scheduler(num_blocks=12, block_size=4)
    events = EventBuffer()
    scheduler = Scheduler(scheduler.config, scheduler.cache.config, events)
    index = ReportedIndex()
    root = root_hash(scheduler.cache.config.model_key, 4)
    for i in range(60):
        prompt = [rng.randrange(2) for _ in range(rng.randint(1, 20))]
        scheduler.add(request(f"r{i}", prompt, max_tokens=3), now=float(i))
        for _ in range(rng.randint(1, 6)):
            step(scheduler)
        assert index.apply(0, events.drain())
        links: list[bytes] = []
        extend_chain(links, root, [rng.randrange(2) for _ in range(20)], 4)
        nodes = scheduler.cache.prefix.nodes
        assert index.holders.depths(links, 1)[0] == next(
            (d for d, h in enumerate(links) if h not in nodes), len(links)
        )
    assert scheduler.cache.prefix.num_evicted


def test_wrong_settings_are_named() -> None:
    with pytest.raises(ConfigError, match=r"least-loded.*did you mean 'least-loaded'"):
        Router("least-loded", 2)
    with pytest.raises(ConfigError, match="max_load_ratio"):
        Router("random", 2, max_load_ratio=0.9)


def test_fewest_tokens_decide_and_two_choices_are_enough() -> None:
    router = Router("least-tokens", 3)
    assert router.route("a", Demand(num_prompt_tokens=1000)) == 0
    assert [router.route(str(i), Demand(num_prompt_tokens=100)) for i in range(4)] == [1, 2, 1, 2]
    for policy, most in (("power-of-two", 40), ("random", 80)):
        router = Router(policy, 50, seed=5)
        for i in range(1500):
            router.route(str(i), Demand(num_output_tokens=10))
        loads = [load.requests for load in router.loads]
        assert max(loads) <= most
        assert policy == "random" or max(loads) - min(loads) <= 5


def test_a_session_stays_where_it_is_while_others_come_and_go() -> None:
    router = Router("session", 8, max_load_ratio=100.0)
    keys = [f"user {i}".encode() for i in range(200)]

    def places(among: list[int]) -> dict[bytes, int | None]:
        found = {}
        for key in keys:
            found[key] = router.route(key.decode(), Demand(key=key), among)
            router.finished(key.decode())
        return found

    before, without = places(list(range(8))), places([0, 1, 2, 4, 5, 6, 7])
    assert set(before.values()) == set(range(8))
    assert all(without[key] == place for key, place in before.items() if place != 3)


def test_a_slower_replica_gets_fewer_new_prompts() -> None:
    router = Router("prefix-predicted", 2, max_load_ratio=10.0)
    for tokens in (100, 2000, 500) * 20:
        router.ttft.observe(0, tokens, tokens * 4e-4)
        router.ttft.observe(1, tokens, tokens * 1e-4)
    placed = [router.route(str(i), Demand(chain(i), 1000)) for i in range(50)]
    assert 5 <= placed.count(0) <= 15


def test_a_prefix_is_followed_until_its_queue_is_longer_than_computing_it() -> None:
    router = Router("prefix-predicted", 2, max_load_ratio=10.0)
    links = chain(*range(10))
    assert router.route("a", Demand(links, 1000)) == 0
    router.started("a")
    places = [router.route(str(i), Demand([*links[:8], bytes([i])], 900)) for i in range(20)]
    assert places[0] == 0
    assert 1 in places
    assert router.loads[0].queued_tokens <= router.loads[1].queued_tokens + 2 * 900


def test_what_is_not_sent_again_is_forgotten_in_time() -> None:
    index = PredictedIndex(100)
    index.sent(0, chain(1, 2))
    index.sent(0, chain(7, 8))
    for _ in range(TICKS_TO_LIVE):
        index.tick()
        index.sent(0, chain(7))
    index.tick()
    assert index.holders.depths(chain(1, 2), 1) == [0]
    assert index.holders.depths(chain(7, 8), 1) == [1]
