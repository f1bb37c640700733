"""Regions: the own one first, spill-over and failover, and back without going to and fro."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from tests.gateway.live import Scripted, gateway_of, says
from tests.gateway.live import backends as served

from quire.errors import ConfigError
from quire_gateway.breaker import Breaker
from quire_gateway.config import BackendArgs, HealthArgs
from quire_gateway.config_file import gateway_config
from quire_gateway.fleet import Backend
from quire_gateway.region_config import RegionArgs, RegionConfig
from quire_gateway.regions import Regions

ARGS = RegionArgs("eu", spill_s=2.0, return_s=0.5, return_after_s=30.0)


def backend(name: str, region: str | None) -> Backend:
    return Backend(name, "", BackendArgs(region=region), "config", 0, Breaker(HealthArgs()))


EU, US, ASIA = backend("eu1", None), backend("us1", "us"), backend("asia1", "asia")
ALL = [EU, US, ASIA]


class World:
    """The queues of three backends, and a policy."""

    def __init__(self) -> None:
        self.regions = Regions(RegionConfig(ARGS, {"us": 100.0, "asia": 300.0}))
        self.queue_s = {"eu1": 0.0, "us1": 0.0, "asia1": 0.0}

    def choose(self, now: float, ready: list[Backend] | None = None, tried: tuple[Backend, ...] = ()) -> str:
        ready = ALL if ready is None else ready
        candidates = [b for b in ready if b not in tried]
        (found,) = self.regions.among("m", candidates, ready, lambda b: self.queue_s[b.name], now)
        return found.name


def test_the_own_region_comes_first() -> None:
    world = World()
    world.queue_s["eu1"] = 1.9  # longer than elsewhere, and within the limit
    assert world.choose(0.0) == "eu1"
    assert world.choose(0.0, tried=(EU,)) == "us1"  # a retry goes elsewhere
    assert world.choose(0.0) == "eu1"


def test_spill_over_goes_by_latency_and_queue() -> None:
    world = World()
    world.queue_s |= {"eu1": 2.5, "us1": 0.4, "asia1": 0.0}
    assert world.choose(0.0) == "asia1"  # 0.3 s away with an empty queue, against 0.1 + 0.4
    world.queue_s |= {"us1": 0.1}
    assert world.choose(1.0) == "us1"
    world.queue_s |= {"us1": 5.0, "asia1": 5.0}
    assert world.choose(2.0) == "eu1"  # everything else is worse
    world.queue_s |= {"eu1": 0.6, "us1": 0.0}
    assert world.choose(3.0) == "us1"  # still spilling
    world.queue_s |= {"eu1": 0.4}
    assert world.choose(4.0) == "eu1"
    world.queue_s |= {"eu1": 1.5}
    assert world.choose(5.0) == "eu1"  # not spilling again before the upper limit


def test_failover_is_at_once_and_the_way_back_slow() -> None:
    world = World()
    assert world.choose(0.0, ready=[US, ASIA]) == "us1"
    assert world.choose(1.0) == "us1"  # back, and not trusted yet
    assert world.choose(20.0, ready=[US, ASIA]) == "us1"
    assert world.choose(25.0) == "us1"
    assert world.choose(54.0) == "us1"
    assert world.choose(55.0) == "eu1"
    assert world.regions.counts == {("us", "failover"): 5, ("eu", "own"): 1}


def test_away_uses_the_own_region_rather_than_none() -> None:
    world = World()
    world.choose(0.0, ready=[US])
    assert world.choose(1.0, ready=[EU]) == "eu1"


@pytest.mark.parametrize("return_s", [0.5, 2.0])
def test_hysteresis_bounds_the_changes_of_side(return_s: float) -> None:
    """A queue that drifts around the limit: with two limits apart, requests change sides far less often."""
    args = RegionArgs("eu", spill_s=2.0, return_s=return_s)
    regions, random, queue, sides = Regions(RegionConfig(args, {"us": 100.0})), Random(7), 2.0, []
    for step in range(2000):
        queue = min(max(queue + random.uniform(-0.3, 0.3), 0.2), 4.0)
        costs = {"eu1": queue, "us1": 0.0}
        (found,) = regions.among("m", [EU, US], [EU, US], lambda b, costs=costs: costs[b.name], float(step))
        sides.append(found.name)
    changes = sum(a != b for a, b in pairwise(sides))
    assert changes < 20 if return_s < 2.0 else changes > 40


def test_requests_fail_over_in_a_gateway() -> None:
    async def main() -> None:
        eu, us = Scripted(says("x")), Scripted(says("x"))
        async with served(eu, us):
            named = [
                {"name": "eu", "url": eu.url, "region": "eu"},
                {"name": "us", "url": us.url, "region": "us"},
            ]
            config: dict[str, Any] = {
                "backends": named,
                "health": {"interval_s": 0.05, "slow_start_s": 0.0},
                "regions": {"own": "eu", "latency_ms": {"us": 90}, "return_after_s": 0.3},
            }
            async with gateway_of(config) as live:
                for _ in range(4):
                    await live.post({"model": "m", "prompt": "x"})
                assert (len(eu.received), len(us.received)) == (4, 0)
                eu.ready = False
                await live.until(lambda: not live.state.fleet.named("eu").is_ready)
                assert (await live.post({"model": "m", "prompt": "x"}))[0] == 200
                assert len(us.received) == 1
                async with live.session.get(live.url + "/admin/routing") as response:
                    assert (await response.json())["regions"] == {"m": "away"}
                eu.ready = True
                while len(eu.received) == 4:
                    await live.post({"model": "m", "prompt": "x"})
                    await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize(
    ("regions", "message"),
    [
        ({"spill_s": 1.0}, "own is required"),
        ({"own": "eu", "return_s": 5.0}, "return_s = 5 must be at most spill_s"),
        ({"own": "eu", "latency_ms": {"us": -1}}, "must be a table of milliseconds"),
    ],
)
def test_wrong_regions_are_named(regions: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gateway_config({"regions": regions})
