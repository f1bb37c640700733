"""Breaker, fleet and retry budget on a clock that the test moves; polling over real sockets."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from tests.gateway.live import Received, Scripted, answer, gateway, says
from tests.gateway.test_proxy import ASK, run

from quire.errors import NotFoundError
from quire_gateway.breaker import MIN_REQUESTS, Breaker
from quire_gateway.config import BackendArgs, HealthArgs
from quire_gateway.fleet import Backend, Fleet
from quire_gateway.retries import RetryBudget
from quire_gateway.routing import Router

ARGS = HealthArgs(max_failures=3, open_s=5.0, max_open_s=12.0, slow_start_s=10.0)


def test_failures_in_a_row_open_the_breaker_for_longer_each_time() -> None:
    breaker, now = Breaker(ARGS), 0.0
    for expected_s in (5.0, 10.0, 12.0, 12.0):
        while breaker.allows(now):
            breaker.taken(now)
            breaker.failed(now)
        assert breaker.state(now) == "open"
        assert breaker.state(now + expected_s - 0.01) == "open"
        now += expected_s
        assert breaker.state(now) == "half-open"
    assert breaker.num_ejections == 4


def test_one_trial_at_a_time_and_two_successes_close_it() -> None:
    breaker = Breaker(ARGS)
    for _ in range(3):
        breaker.failed(0.0)
    assert not breaker.allows(4.9)
    for trial in range(2):
        assert breaker.allows(6.0)
        breaker.taken(6.0)
        assert not breaker.allows(6.0)
        if trial == 0:
            breaker.withdrawn()  # its client left: it says nothing
            assert breaker.allows(6.0)
            breaker.taken(6.0)
        breaker.succeeded(6.0)
    assert breaker.state(6.0) == "closed"
    assert breaker.share(6.0) == pytest.approx(0.1)
    assert breaker.share(11.0) == pytest.approx(0.5)
    assert breaker.share(16.0) == 1.0


def test_a_share_of_failures_opens_it_too() -> None:
    breaker = Breaker(ARGS)
    for i in range(MIN_REQUESTS):
        assert breaker.state(1.0) == "closed"
        (breaker.failed if i % 2 else breaker.succeeded)(1.0)
    assert breaker.state(1.0) == "open"
    old = Breaker(ARGS)
    for i in range(4 * MIN_REQUESTS):  # as many, but few in any ten seconds
        (old.failed if i % 2 else old.succeeded)(float(2 * i))
    assert old.state(1e6) == "closed"


def fleet_of(num: int) -> tuple[Fleet, list[Backend]]:
    fleet = Fleet(Router("round-robin"), ARGS, Random(1))
    for i in range(num):
        fleet.add(f"b{i}", f"http://b{i}", BackendArgs(models=("m",), max_requests=2), "config")
    made = list(fleet)
    for backend in made:
        fleet.set_ready(backend, True, "", 0.0)
    return fleet, made


def test_candidates_are_ready_open_and_have_room() -> None:
    fleet, (a, b, c) = fleet_of(3)
    assert fleet.candidates("m", 0.0) == [a, b, c]
    assert fleet.candidates("other", 0.0) == []
    a.is_draining = True
    for _ in range(3):
        b.breaker.failed(0.0)
    assert fleet.candidates("m", 0.0) == [c]
    fleet.router.loads[c.number].requests = 2
    assert fleet.candidates("m", 0.0) == []


def test_most_breakers_open_means_that_all_are_used() -> None:
    fleet, backends = fleet_of(4)
    for backend in backends[:3]:
        for _ in range(3):
            backend.breaker.failed(0.0)
    assert fleet.candidates("m", 0.0) == backends
    fleet.set_ready(backends[0], False, "down", 0.0)  # a poll knows better than a breaker
    assert fleet.candidates("m", 0.0) == backends[1:]


def test_silence_of_most_backends_means_that_all_are_used() -> None:
    fleet, backends = fleet_of(4)
    fleet.set_ready(backends[0], False, "too late", 0.0, is_silent=True)
    assert fleet.candidates("m", 0.0) == backends[1:]
    for backend in backends[1:3]:
        fleet.set_ready(backend, False, "too late", 0.0, is_silent=True)
    assert fleet.candidates("m", 0.0) == backends
    for _ in range(3):
        backends[1].breaker.failed(0.0)
    assert fleet.candidates("m", 0.0) == [backends[0], *backends[2:]]
    fleet.set_ready(backends[0], False, "refused", 0.0)  # an attempt, or a poll, that says more
    fleet.set_ready(backends[0], False, "too late", 0.0, is_silent=True)
    assert fleet.candidates("m", 0.0) == backends[2:]


def test_silent_polls_everywhere_refuse_no_request() -> None:
    async def main() -> None:
        backends = [Scripted(says("x")), Scripted(says("x"))]
        async with gateway(*backends, health={"timeout_s": 0.1}) as live:
            for backend in backends:
                backend.is_silent = True
            await live.until(lambda: not any(b.is_ready for b in live.state.fleet))
            assert (await live.post(ASK))[0] == 200
            async with live.session.get(live.url + "/readyz") as response:
                assert response.status == 200

    run(main())


def test_a_recovered_backend_starts_slowly() -> None:
    fleet, (a, b) = fleet_of(2)
    fleet.set_ready(a, False, "down", 100.0)
    fleet.set_ready(a, True, "", 100.0)
    early = sum(a in fleet.candidates("m", 101.0) for _ in range(1000))
    assert 50 < early < 180
    assert all(a in fleet.candidates("m", 111.0) for _ in range(20))
    fleet.set_ready(b, False, "down", 101.0)
    assert fleet.candidates("m", 101.0) == [a]  # better than none


def test_the_failures_of_a_dead_process_are_not_its_heirs() -> None:
    fleet, (a, _) = fleet_of(2)
    for _ in range(3):
        a.breaker.failed(100.0)  # all its connections broke
    fleet.set_ready(a, False, "refused", 100.0, is_lost=True)
    fleet.set_ready(a, True, "", 101.0)
    assert a.breaker.state(101.0) == "closed"
    assert a.breaker.share(101.0) == pytest.approx(0.1)
    for _ in range(3):
        a.breaker.failed(102.0)
    fleet.set_ready(a, False, "too late", 103.0, is_silent=True, is_lost=True)
    fleet.set_ready(a, True, "", 104.0)
    assert a.breaker.state(104.0) == "open", "it is the same process"
    assert a.breaker.state(111.9) == "open", "and this time for ten seconds"


def test_a_number_is_used_again_without_its_past() -> None:
    fleet, (a, b) = fleet_of(2)
    fleet.router.route("r", among=[a.number])
    fleet.remove(a)
    with pytest.raises(NotFoundError, match="Backends: 'b1'"):
        fleet.named("b0")
    again = fleet.add("new", "http://new", BackendArgs(models=("m",)), "dns")
    assert again.number == a.number
    assert fleet.router.loads[again.number].requests == 0
    fleet.router.finished("r")  # of the backend that had the number before
    assert fleet.router.loads[again.number].requests == 0
    assert fleet.serving("m") == [b, again]


def test_retries_are_a_share_of_the_requests() -> None:
    budget = RetryBudget(0.2, 5)
    taken = 0
    for _ in range(1000):
        budget.earn()
        taken += budget.take()
    assert 195 <= taken <= 210
    assert budget.num_refused == 1000 - taken


def test_a_backend_that_fails_is_ejected_and_comes_back() -> None:
    broken = True

    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        await (answer(writer, 500, b"{}") if broken else says("ok")(request, writer))

    async def main() -> None:
        nonlocal broken
        bad, good = Scripted(script), Scripted(says("ok"))
        health = {"max_failures": 2, "open_s": 0.1}
        async with gateway(bad, good, routing={"policy": "round-robin"}, health=health) as live:
            for _ in range(20):
                assert (await live.post(ASK))[0] == 200
            assert len(bad.received) < 8
            broken = False
            backend = live.state.fleet.named("b0")
            for _ in range(200):
                assert (await live.post(ASK))[0] == 200
                if backend.breaker.state(live.state.now()) == "closed":
                    break
                await asyncio.sleep(0.01)
            assert backend.breaker.state(live.state.now()) == "closed"
            assert backend.breaker.num_ejections >= 1

    run(main())


def test_polls_see_a_backend_go_and_come_back() -> None:
    async def main() -> None:
        backend = Scripted(says("x"))
        async with gateway(backend) as live:
            backend.ready = False
            await live.until(lambda: not live.state.fleet.named("b0").is_ready)
            assert (await live.post(ASK))[0] == 503
            backend.ready, backend.models = True, ("m", "new-adapter")
            await live.until(lambda: live.state.fleet.named("b0").is_ready)
            await live.until(lambda: "new-adapter" in live.state.fleet.models)
            assert (await live.post({"model": "new-adapter"}))[0] == 200
            async with live.session.get(live.url + "/v1/models") as response:
                listed = await response.json()
            assert [card["id"] for card in listed["data"]] == ["m", "new-adapter"]

    run(main())
