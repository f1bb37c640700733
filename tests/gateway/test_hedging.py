"""Hedged requests: the first token wins, the other attempt ends, and one row is written."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from tests.gateway.live import Received, Script, Scripted, answer, begin_stream, chunk, gateway, says

from quire_gateway.ledger_database import open_database
from quire_gateway.ledger_report import report

STREAM = {"model": "m", "prompt": "hi", "stream": True}
HEDGING = {"after_s": 0.1, "max_prompt_tokens": 50, "budget": 1.0}
SETTINGS: dict[str, Any] = {"routing": {"policy": "round-robin"}, "hedging": HEDGING}


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


def waits(begins: asyncio.Event | None = None) -> Script:
    """Send the head, and no event before the connection ends or ``begins`` is set."""

    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        await begin_stream(writer)
        if begins is not None:
            await begins.wait()
            await chunk(writer, b'data: {"text": "late"}\n\n')
            await chunk(writer, b"")
            return
        while True:
            await chunk(writer, b": still here\n\n")
            await asyncio.sleep(0.02)

    return script


def test_the_first_token_wins_and_the_other_is_cancelled(tmp_path: Path) -> None:
    async def main() -> None:
        slow, quick = Scripted(waits()), Scripted(says("hey"))
        ledger = str(tmp_path / "ledger.sqlite")
        async with gateway(slow, quick, ledger=ledger, **SETTINGS) as live:
            status, body = await live.post(STREAM, x_quire_explain="1")
            assert (status, body.count(b'"text"')) == (200, 3)
            assert live.headers["x-quire-backend"] == "b1"
            await live.until(lambda: slow.num_left == 1)
            hedging = live.state.hedging
            assert hedging is not None
            assert hedging.counts == {("b0", "lost"): 1, ("b1", "won"): 1}
            assert hedging.waste[("b0",)] > 0
            assert [load.requests for load in live.state.router.loads] == [0, 0]
            assert live.state.fleet.named("b0").breaker.state(live.state.now()) == "closed"
            async with live.session.get(live.url + "/metrics") as response:
                assert 'quire:gateway_hedges_total{backend="b1",result="won"} 1.0' in await response.text()
        database = open_database(ledger)
        (row,) = report(database, ["backend"])
        database.close()
        assert (row["backend"], row["requests"], row["output_tokens"]) == ("b1", 1, 3)

    run(main())


def test_a_quick_answer_needs_no_second_attempt() -> None:
    async def main() -> None:
        one, two = Scripted(says("x")), Scripted(says("x"))
        patient = SETTINGS | {"hedging": HEDGING | {"after_s": 20.0}}
        async with gateway(one, two, **patient) as live:
            assert (await live.post(STREAM))[0] == 200
            assert len(one.received) + len(two.received) == 1
            assert live.state.hedging is not None
            assert not live.state.hedging.counts

    run(main())


def test_the_slower_first_attempt_may_still_win() -> None:
    async def main() -> None:
        begins = asyncio.Event()
        first, second = Scripted(waits(begins)), Scripted(waits())
        async with gateway(first, second, **SETTINGS) as live:
            asking = asyncio.create_task(live.post(STREAM, x_quire_explain="1"))
            await live.until(lambda: len(second.received) == 1)
            begins.set()
            status, body = await asking
            assert (status, body) == (200, b'data: {"text": "late"}\n\n')
            assert live.headers["x-quire-backend"] == "b0"
            await live.until(lambda: second.num_left == 1)

    run(main())


def test_long_prompts_whole_answers_and_the_budget_are_bounds() -> None:
    async def main() -> None:
        slow, other = Scripted(waits(asyncio.Event())), Scripted(says("x"))
        tight = SETTINGS | {"timeouts": {"first_token_s": 0.5}, "retries": {"attempts": 1}}
        async with gateway(slow, other, **tight) as live:
            status, _ = await live.post(STREAM | {"prompt": "once upon a time " * 40})
            assert (status, len(other.received)) == (504, 0)
        async with gateway(slow, other, **(tight | {"hedging": HEDGING | {"budget": 0.0}})) as live:
            assert live.state.hedging is not None
            live.state.hedging.budget.balance = 0.0
            status, _ = await live.post(STREAM)
            assert (status, len(other.received)) == (504, 0)

    run(main())


def test_attempts_that_fail_leave_the_other_running() -> None:
    async def main() -> None:
        async def fails_late(request: Received, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(0.4)
            writer.close()

        async def refuses(request: Received, writer: asyncio.StreamWriter) -> None:
            await answer(writer, 400, b'{"error": {"message": "no"}}')

        dying, good = Scripted(fails_late), Scripted(says("hey"))
        async with gateway(dying, good, **SETTINGS) as live:
            status, body = await live.post(STREAM)
            assert (status, body.count(b'"text"')) == (200, 3)
        async with gateway(Scripted(fails_late), Scripted(fails_late), **SETTINGS) as live:
            status, _ = await live.post(STREAM)
            assert status == 502
            assert [load.requests for load in live.state.router.loads] == [0, 0]
            assert live.state.metrics.failures.total() >= 2
        async with gateway(Scripted(waits()), Scripted(refuses), **SETTINGS) as live:
            status, body = await live.post(STREAM)
            assert (status, body) == (400, b'{"error": {"message": "no"}}')

    run(main())


def test_whole_answers_are_hedged_after_a_time_of_their_own() -> None:
    async def main() -> None:
        whole = {"model": "m", "prompt": "hi"}
        slow, quick = Scripted(waits(asyncio.Event())), Scripted(says("hey"))
        settings = SETTINGS | {"hedging": {"whole_after_s": 0.1, "budget": 1.0}}
        async with gateway(slow, quick, **settings) as live:
            status, body = await live.post(whole, x_quire_explain="1")
            assert (status, b"hey" in body, live.headers["x-quire-backend"]) == (200, True, "b1")
            assert live.state.hedging is not None
            assert live.state.hedging.counts == {("b0", "lost"): 1, ("b1", "won"): 1}
        async with gateway(slow, quick, **(SETTINGS | {"timeouts": {"total_s": 0.4}})) as live:
            await live.post(whole)  # `after_s` is of streams
            assert live.state.hedging is not None
            assert not live.state.hedging.counts

    run(main())


def test_a_refusal_does_not_beat_an_attempt_that_runs() -> None:
    async def main() -> None:
        begins = asyncio.Event()

        async def is_full(request: Received, writer: asyncio.StreamWriter) -> None:
            await answer(writer, 503, b"{}")
            begins.set()

        async with gateway(Scripted(waits(begins)), Scripted(is_full), **SETTINGS) as live:
            status, body = await live.post(STREAM)
            assert (status, body) == (200, b'data: {"text": "late"}\n\n')
            assert live.state.fleet.named("b1").breaker.state(live.state.now()) == "closed"

    run(main())


def test_a_client_that_leaves_ends_both_attempts() -> None:
    async def main() -> None:
        one, two = Scripted(waits()), Scripted(waits())
        async with gateway(one, two, **SETTINGS) as live:
            asking = asyncio.create_task(live.post(STREAM))
            await live.until(lambda: len(one.received) + len(two.received) == 2)
            asking.cancel()
            await live.until(lambda: one.num_left + two.num_left == 2)
            await live.until(lambda: live.state.num_open == 0)
            assert [load.requests for load in live.state.router.loads] == [0, 0]

    run(main())
