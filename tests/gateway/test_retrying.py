"""What becomes of requests whose backend dies, hangs or has no room: where they go, and what that costs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.gateway.live import (
    Live,
    Received,
    Script,
    Scripted,
    answer,
    begin_stream,
    chunk,
    frame,
    gateway,
    says,
)
from tests.gateway.test_migrate import Quill, group
from tests.gateway.test_proxy import ASK, STREAM, run
from tests.gateway.test_tenants import config, make_keys, rows

from quire_gateway.breaker import Breaker
from quire_gateway.config import BackendArgs, HealthArgs, TimeoutArgs
from quire_gateway.fleet import Fleet
from quire_gateway.routing import Router
from quire_gateway.upstream import BackendFailed, Reply

NO_RETRIES = {"budget": 0.0, "reserve": 1}
TURNS = {"policy": "round-robin"}
HUNG = {"timeout_s": 0.1, "interval_s": 0.05}
NUM = 12


def held(until: asyncio.Event) -> Script:
    """Answer nothing before the connection ends; close it once ``until`` is set."""

    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        await until.wait()
        writer.close()

    return script


def refuses(status: int, code: str = "", message: str = "no") -> Script:
    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        body = json.dumps({"error": {"message": message, "code": code}}).encode()
        await answer(writer, status, body, {"retry-after": "7"})

    return script


async def ask_many(live: Live, waiting: Scripted, num: int = NUM) -> list[asyncio.Task[tuple[int, bytes]]]:
    """Ask in turns for streams and whole answers; return once ``waiting`` has its half."""
    asking = [asyncio.create_task(live.post(STREAM if i % 2 else ASK)) for i in range(num)]
    await live.until(lambda: len(waiting.received) == num // 2)
    return asking


async def check_all(asking: list[asyncio.Task[tuple[int, bytes]]]) -> None:
    for status, body in await asyncio.gather(*asking):
        assert status == 200, body
        assert body.endswith(b"[DONE]\n\n") or json.loads(body)["text"] == "ok"


def test_requests_at_a_dead_backend_cost_no_retries() -> None:
    async def main() -> None:
        dies = asyncio.Event()
        dying, good = Scripted(held(dies)), Scripted(says("ok"))
        async with gateway(dying, good, routing=TURNS, retries=NO_RETRIES) as live:
            asking = await ask_many(live, dying)
            dies.set()
            await check_all(asking)
            assert len(good.received) == NUM
            assert live.state.budget.num_taken == 0

    run(main())


def test_requests_at_a_hung_backend_move(tmp_path: Path) -> None:
    async def main() -> None:
        never = asyncio.Event()
        hung, good = Scripted(held(never)), Scripted(says("ok"))
        ledger = config(tmp_path, prices={"m": {"output": 1.0}})
        keys = make_keys(tmp_path, alice={})
        async with gateway(hung, good, routing=TURNS, retries=NO_RETRIES, health=HUNG, **ledger) as live:
            asking = [
                asyncio.create_task(live.post(STREAM if i % 2 else ASK, authorization=keys["alice"]))
                for i in range(NUM)
            ]
            await live.until(lambda: len(hung.received) == NUM // 2)
            hung.is_silent = True
            await check_all(asking)
            backend = live.state.fleet.named("b0")
            assert backend.breaker.state(live.state.now()) == "closed", "the polls know it already"
            assert not backend.watchers
            assert [load.requests for load in live.state.router.loads] == [0, 0]
            assert live.state.metrics.failures["b0", "unready"] == NUM // 2
            assert live.state.budget.num_taken == 0

    run(main())
    booked = rows(tmp_path)["ok"]
    assert (booked["requests"], booked["output_tokens"]) == (NUM, 2 * NUM), (
        "each once, of the one that answered"
    )


def test_events_of_a_first_attempt_are_not_billed(tmp_path: Path) -> None:
    async def half(request: Received, writer: asyncio.StreamWriter) -> None:
        await begin_stream(writer)
        usage = {"prompt_tokens": 5000, "completion_tokens": 900}
        await chunk(writer, frame({"choices": [{"index": 0, "text": "held back"}], "usage": usage}))
        writer.close()

    async def counts_nothing(request: Received, writer: asyncio.StreamWriter) -> None:
        await begin_stream(writer)
        await chunk(writer, frame({"text": "a"}) + b"data: [DONE]\n\n")
        await chunk(writer, b"")

    async def main() -> None:
        # The filter holds the text back, so that the first attempt breaks before the client has a byte.
        words = [{"keywords": ["never"], "action": "redact", "when": "after", "hold_chars": 1000}]
        settings = config(tmp_path, filters=words)
        keys = make_keys(tmp_path, alice={})
        async with gateway(Scripted(half), Scripted(counts_nothing), routing=TURNS, **settings) as live:
            status, body = await live.post(STREAM, authorization=keys["alice"])
            assert status == 200, body

    run(main())
    booked = rows(tmp_path)["ok"]
    assert booked["prompt_tokens"] < 100
    assert booked["output_tokens"] <= 2


def test_a_begun_stream_moves_when_its_replica_hangs() -> None:
    async def hangs(request: Received, writer: asyncio.StreamWriter) -> None:
        await begin_stream(writer, {"x-quire-tagged": "f"})
        await chunk(writer, group([0, [0], 0], frame({"text": "a"})))
        await asyncio.sleep(60)

    async def goes_on(request: Received, writer: asyncio.StreamWriter) -> None:
        assert request.body["delivered"] == [[0, [0], 0]]
        await begin_stream(writer, {"x-quire-tagged": "f"})
        await chunk(writer, group([0, [1], 0], frame({"text": "b"})) + group(0, b"data: [DONE]\n\n"))
        await chunk(writer, b"")

    async def main() -> None:
        hung, good = Quill(hangs), Quill(goes_on)
        async with gateway(hung, good, routing=TURNS, health=HUNG, gateway_key="between-us") as live:
            asking = asyncio.create_task(live.post(STREAM))
            await live.until(lambda: len(hung.received) == 1)
            hung.is_silent = True
            status, body = await asking
            assert (status, body) == (200, frame({"text": "a"}) + frame({"text": "b"}) + b"data: [DONE]\n\n")

    run(main())


def test_requests_stay_where_a_replica_drains() -> None:
    async def main() -> None:
        ends = asyncio.Event()

        async def slow(request: Received, writer: asyncio.StreamWriter) -> None:
            await ends.wait()
            await says("ok")(request, writer)

        leaving, other = Scripted(slow), Scripted(says("ok"))
        async with gateway(leaving, other, routing=TURNS) as live:
            asking = await ask_many(live, leaving)
            leaving.ready, leaving.says = False, "draining"
            await live.until(lambda: not live.state.fleet.named("b0").is_ready)
            await asyncio.sleep(0.2)
            ends.set()
            await check_all(asking)
            assert len(leaving.received) == NUM // 2
            assert not live.state.metrics.failures

    run(main())


def test_requests_stay_where_no_replica_is_better() -> None:
    async def main() -> None:
        ends = asyncio.Event()

        async def slow(request: Received, writer: asyncio.StreamWriter) -> None:
            await ends.wait()
            await says("ok")(request, writer)

        both = [Scripted(slow), Scripted(slow)]
        async with gateway(*both, routing=TURNS, health=HUNG) as live:
            asking = await ask_many(live, both[0])
            for each in both:
                each.is_silent = True
            await live.until(lambda: not any(b.is_ready for b in live.state.fleet))
            await asyncio.sleep(0.4)
            ends.set()
            await check_all(asking)
            assert sum(len(each.received) for each in both) == NUM

    run(main())


def test_a_request_outlives_the_restart_of_the_only_one() -> None:
    async def main() -> None:
        is_first = True

        async def dies_once(request: Received, writer: asyncio.StreamWriter) -> None:
            nonlocal is_first
            if not is_first:
                await says("ok")(request, writer)
                return
            is_first, backend.ready = False, False
            writer.close()

        backend = Scripted(dies_once)
        async with gateway(backend) as live:
            asking = asyncio.create_task(live.post(ASK))
            await live.until(lambda: not live.state.fleet.named("b0").is_ready)
            backend.ready = True
            status, body = await asking
            assert (status, json.loads(body)["text"]) == (200, "ok")

    run(main())


def test_a_dead_backend_that_stays_away_is_a_503() -> None:
    async def main() -> None:
        async def dies(request: Received, writer: asyncio.StreamWriter) -> None:
            backend.ready = False
            writer.close()

        backend = Scripted(dies)
        async with gateway(backend, timeouts={"ready_s": 0.3}) as live:
            status, body = await live.post(ASK)
            assert (status, json.loads(body)["error"]["code"]) == (503, "no_backend")
            assert live.headers["retry-after"] == "1"

    run(main())


def test_what_kills_every_backend_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_gateway.retrying.MAX_DEATHS", 2)

    async def main() -> None:
        dies = asyncio.Event()
        dies.set()
        dying = [Scripted(held(dies)) for _ in range(4)]
        async with gateway(*dying) as live:
            assert (await live.post(ASK))[0] == 502
            assert sum(len(each.received) for each in dying) == 2

    run(main())


def test_what_was_tried_is_a_model_at_a_backend() -> None:
    async def by_model(request: Received, writer: asyncio.StreamWriter) -> None:
        await (refuses(429) if request.body["model"] == "r429" else says("ok"))(request, writer)

    async def main() -> None:
        both = [Scripted(by_model, models=("r429", "ok")) for _ in range(2)]
        models = [{"name": "r429", "fallbacks": ["ok"], "fallback_when": ["429"]}]
        async with gateway(*both, models=models) as live:
            status, body = await live.post({"model": "r429"})
            assert (status, json.loads(body)["model"]) == (200, "ok")
            assert [b.breaker.in_row for b in live.state.fleet] == [0, 0], "429 is no failure of a backend"

    run(main())


def test_a_fallback_is_not_paid_for() -> None:
    async def main() -> None:
        full = [Scripted(refuses(503, "queue_full"), models=("large",)) for _ in range(2)]
        small = Scripted(says("s"), models=("small",))
        models = [{"name": "large", "fallbacks": ["small"], "fallback_when": "saturated"}]
        async with gateway(*full, small, models=models, retries=NO_RETRIES) as live:
            answers = await asyncio.gather(*(live.post({"model": "large"}) for _ in range(40)))
            assert [status for status, _ in answers] == [200] * 40
            assert live.state.budget.num_taken <= 1
            assert sum(len(each.received) for each in full) <= 41, "a second attempt at the model is paid"

    run(main())


def test_a_fallback_is_idle_while_max_requests_are_out() -> None:
    async def main() -> None:
        never = asyncio.Event()
        busy, small = Scripted(held(never), models=("large",)), Scripted(says("s"), models=("small",))
        models = [{"name": "large", "fallbacks": ["small"], "fallback_when": ["saturated"]}]
        async with gateway(busy, small, models=models) as live:
            backend = live.state.fleet.named("b0")
            backend.args = BackendArgs(url=busy.url, max_requests=1)
            first = asyncio.create_task(live.post({"model": "large"}))
            await live.until(lambda: len(busy.received) == 1)
            assert (await live.post({"model": "large"}))[0] == 200
            assert live.headers["x-quire-fallback-model"] == "small"
            never.set()
            await first

    run(main())


CASES: list[tuple[Script, str]] = [
    (refuses(429), "429"),
    (refuses(429), "saturated"),
    (refuses(503), "5xx"),
    (refuses(503), "saturated"),
    (refuses(500), "5xx"),
    (refuses(500), "failure"),
    (refuses(504), "5xx"),
    (refuses(400, "context_length_exceeded"), "context_length"),
    (refuses(400, message="This model's maximum context length is 8 tokens."), "context_length"),
    (refuses(400, "content_filter"), "content_filter"),
]


@pytest.mark.parametrize(
    ("script", "cause"), CASES, ids=[f"{i}-{cause}" for i, (_, cause) in enumerate(CASES)]
)
def test_a_fallback_is_taken_for_its_causes_alone(script: Script, cause: str) -> None:
    async def main() -> None:
        large, small = Scripted(script, models=("large",)), Scripted(says("s"), models=("small",))
        pair = [{"name": "large", "fallbacks": ["small"]}, {"name": "again", "split": {"large": 1.0}}]
        pair[0]["fallback_when"], pair[1]["fallbacks"] = [cause], ["small"]
        others = {"429", "5xx", "context_length", "content_filter"} - {cause}
        others -= {"5xx"} if cause == "failure" else {"429", "5xx"} if cause == "saturated" else set()
        pair[1]["fallback_when"] = sorted(others)
        async with gateway(large, small, models=pair, retries={"attempts": 1}) as live:
            assert (await live.post({"model": "large"}))[0] == 200
            assert live.headers["x-quire-fallback-model"] == "small"
            status, _ = await live.post({"model": "again"})
            assert status != 200 or cause in ("failure", "saturated")

    run(main())


def test_a_prompt_too_long_for_a_model_asks_it_once() -> None:
    async def main() -> None:
        script = refuses(400, "context_length_exceeded")
        large = [Scripted(script, models=("large",)) for _ in range(2)]
        small = Scripted(refuses(400, "invalid"), models=("small",))
        models = [{"name": "large", "fallbacks": ["small"], "fallback_when": ["context_length"]}]
        async with gateway(*large, small, models=models) as live:
            for _ in range(8):
                status, body = await live.post({"model": "large"})
                assert (status, json.loads(body)["error"]["code"]) == (400, "invalid")
            assert sum(len(each.received) for each in large) == 8
            assert all(b.breaker.state(live.state.now()) == "closed" for b in live.state.fleet)

    run(main())


def test_a_backend_in_a_new_life_may_be_tried_again() -> None:
    fleet = Fleet(Router("round-robin"), HealthArgs(), Random(1))
    one = fleet.add("one", "http://one", BackendArgs(models=("m", "n")), "config")
    two = fleet.add("two", "http://two", BackendArgs(models=("m", "n")), "config")
    for backend in (one, two):
        fleet.set_ready(backend, True, "", 0.0)
    tried = {(one.life, "m")}
    assert fleet.candidates("m", 0.0, tried) == [two]
    assert fleet.candidates("n", 0.0, tried) == [one, two]
    fleet.set_ready(one, False, "refused", 1.0, is_lost=True)
    fleet.set_ready(one, True, "", 2.0)
    one.breaker = Breaker(HealthArgs())  # without its slow start
    assert fleet.candidates("m", 20.0, tried) == [one, two]


def test_polls_tell_who_watches_a_lost_backend() -> None:
    fleet, calls = Fleet(Router("round-robin"), HealthArgs(), Random(1)), []
    backend = fleet.add("one", "http://one", BackendArgs(models=("m",)), "config")
    backend.watchers.add(lambda: calls.append(backend.is_lost))
    fleet.set_ready(backend, True, "", 0.0)
    fleet.set_ready(backend, False, "it drains", 1.0)
    assert not calls
    for now in (2.0, 3.0):  # each poll: another backend may have become ready
        fleet.set_ready(backend, False, "no answer", now, is_silent=True, is_lost=True)
    assert calls == [True, True]
    fleet.set_ready(backend, True, "", 4.0)
    assert (len(calls), backend.is_lost) == (2, False)


def test_a_refused_poll_needs_no_second_one() -> None:
    async def main() -> None:
        backend = Scripted(says("x"))
        async with gateway(backend, health={"interval_s": 0.05}) as live:
            poller, known = live.state.poller, live.state.fleet.named("b0")
            known.url = "http://127.0.0.1:9"
            failure = await poller.poll(known, lists=False)
            assert failure is not None
            assert (failure.is_sure, failure.is_silent, failure.is_leaving) == (True, False, False)

    run(main())


def test_a_long_queue_opens_no_breaker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_gateway.placing._LATE_S", 0.1)

    async def main() -> None:
        lock, seconds = asyncio.Lock(), 0.0

        async def one_by_one(request: Received, writer: asyncio.StreamWriter) -> None:
            async with lock:
                await asyncio.sleep(seconds)
                await says("ok")(request, writer)

        health = {"max_failures": 2, "slow_factor": 1.0}
        async with gateway(Scripted(one_by_one), health=health) as live:
            for _ in range(12):
                await live.post(STREAM)
            seconds = 0.12
            await asyncio.gather(*(live.post(STREAM) for _ in range(8)))
            breaker = live.state.fleet.named("b0").breaker
            assert breaker.num_ejections == 0
            for _ in range(2):  # alone, and late, whatever the machine has been doing until now
                seconds = 0.12 + 4.0 * live.state.router.ttft.predict(0, 10)
                await live.post(STREAM)
            assert breaker.num_ejections == 1

    run(main())


def test_by_default_a_first_token_may_take_any_time() -> None:
    assert TimeoutArgs().first_token_s is None
    assert HealthArgs().interval_s * 1.25 + 2 * HealthArgs().timeout_s <= 5.5, (
        "a hung one is found in seconds"
    )


@pytest.mark.parametrize(
    ("error", "blames"),
    [
        (BackendFailed("connect", ""), True),
        (BackendFailed("unready", ""), False),
        (BackendFailed("status", "", Reply(500, [], b"")), True),
        (BackendFailed("status", "", Reply(429, [], b"")), False),
        (BackendFailed("status", "", Reply(503, [], b"")), False),
        (BackendFailed("status", "", Reply(400, [], b"")), False),
    ],
)
def test_breakers_count_what_a_backend_does_wrong(error: BackendFailed, blames: Any) -> None:
    assert error.blames_backend is blames
