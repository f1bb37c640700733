"""Admission at the gateway: what is counted before a model is looked up, and how much of a request is written down."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gateway.live import Received, Scripted, answer, gateway, says
from tests.gateway.test_tenants import config, make_keys

from quire.http.limits import NAME_CHARS
from quire_gateway.ledger_database import open_database
from quire_gateway.ledger_report import report

UNKNOWN = {"model": "nobody-serves-this", "prompt": "hi", "max_tokens": 200}


def statuses(
    tmp_path: Path, limits: dict[str, Any], bodies: Sequence[dict[str, Any]], **rights: Any
) -> list[int]:
    """Return the status of each request of one key."""
    keys = make_keys(tmp_path, alice=rights)
    found = []

    async def run() -> None:
        async with gateway(Scripted(says("hello")), **config(tmp_path, limits=limits)) as live:
            for body in bodies:
                found.append((await live.post(body, authorization=keys["alice"]))[0])
                if found[-1] == 429:
                    assert int(live.headers["retry-after"]) > 0

    asyncio.run(run())
    return found


def test_requests_for_unknown_models_pass_no_limit(tmp_path: Path) -> None:
    limits = {"requests_per_minute": 2}
    known = {"model": "m", "prompt": "hi"}
    assert statuses(tmp_path, limits, [UNKNOWN, UNKNOWN, UNKNOWN, known]) == [404, 404, 429, 429]


def test_requests_for_forbidden_models_pass_no_limit(tmp_path: Path) -> None:
    limits = {"requests_per_minute": 2}
    other = {"model": "m", "prompt": "hi"}
    assert statuses(tmp_path, limits, [other, other, other], models=("n",)) == [404, 404, 429]


def test_a_refused_request_has_used_no_tokens(tmp_path: Path) -> None:
    assert statuses(tmp_path, {"tokens_per_day": 250}, [UNKNOWN] * 3) == [404, 404, 404]


def test_a_refused_request_gives_its_place_back(tmp_path: Path) -> None:
    assert statuses(tmp_path, {"concurrent_requests": 1}, [UNKNOWN] * 3) == [404, 404, 404]


def test_as_many_run_at_once_as_the_limit_says(tmp_path: Path) -> None:
    keys = make_keys(tmp_path, alice={})

    async def run() -> None:
        release = asyncio.Event()

        async def waits(request: Any, writer: asyncio.StreamWriter) -> None:
            await release.wait()
            await says("hello")(request, writer)

        backend = Scripted(waits)
        async with gateway(backend, **config(tmp_path, limits={"concurrent_requests": 2})) as live:
            body = {"model": "m", "prompt": "hi"}
            running = [asyncio.create_task(live.post(body, authorization=keys["alice"])) for _ in range(2)]
            await live.until(lambda: len(backend.received) == 2)
            third = asyncio.wait_for(live.post(body, authorization=keys["alice"]), 3)
            assert (await third)[0] == 429
            release.set()
            assert [(await each)[0] for each in running] == [200, 200]
            assert (await live.post(body, authorization=keys["alice"]))[0] == 200

    asyncio.run(run())


def test_a_long_name_is_in_no_row_and_no_log(tmp_path: Path) -> None:
    keys, lines = make_keys(tmp_path, alice={}), tmp_path / "access"

    async def run() -> None:
        settings = config(tmp_path, access_log_file=str(lines))
        async with gateway(Scripted(says("hello")), **settings) as live:
            for name in ("n" * (2 << 20), "n" * 1025):
                status, answer = await live.post({"model": name}, authorization=keys["alice"])
                error = json.loads(answer)["error"]
                assert (status, error["param"], error["code"]) == (400, "model", "limit_exceeded")
                assert len(answer) < 500
            status, answer = await live.post({"model": "n" * 1000}, authorization=keys["alice"])
            assert (status, len(answer) < 1000) == (404, True)

    asyncio.run(run())
    assert lines.stat().st_size < 3000
    written = [json.loads(line)["model"] for line in lines.read_text().splitlines()]
    clipped = "n" * (NAME_CHARS - 1) + "…"
    assert written == [None, None, clipped]
    database = open_database(str(tmp_path / "ledger.sqlite"))
    assert [line["model"] for line in report(database, ["model"])] == [clipped]
    database.close()


def test_large_bodies_are_parsed_by_the_helper_and_sent_as_they_came() -> None:
    """Long lists of token ids come back as arrays; routing and filters read them as lists."""
    backend = Scripted(says("hello"))
    ids = list(range(300_000))
    raw = json.dumps({"model": "m", "prompt": ids, "max_tokens": 1}).encode()

    async def run() -> None:
        async with gateway(backend) as live:
            decode, seen = live.state.bodies.decode, []

            async def decoded(pieces: Sequence[bytes]) -> Any:
                seen.append(sum(map(len, pieces)))
                return await decode(pieces)

            live.state.bodies.decode = decoded  # type: ignore[method-assign]
            assert (await live.post(raw))[0] == 200
            assert (await live.post({"model": "m", "prompt": "hi"}))[0] == 200
            assert seen == [len(raw)]

    asyncio.run(run())
    assert backend.received[0].raw == raw


def test_what_no_server_takes_reaches_no_backend() -> None:
    backend = Scripted(says("hello"))
    turn = {"role": "user", "content": "hi"}
    bodies: list[dict[str, Any]] = [
        {"model": "m", "messages": [turn] * 5000},
        {"model": "m", **{f"k{i}": 1 for i in range(300)}},
        {"model": "m", "prompt": "x" * (5 << 20)},
        {"model": "m", "cache_salt": "x" * 2000},
    ]

    async def run() -> None:
        async with gateway(backend) as live:
            for body in bodies:
                status, refusal = await live.post(body)
                assert (status, json.loads(refusal)["error"]["code"]) == (400, "limit_exceeded")

    asyncio.run(run())
    assert not backend.received


def test_no_503_is_without_its_time() -> None:
    async def full(request: Received, writer: asyncio.StreamWriter) -> None:
        await answer(writer, 503, json.dumps({"error": "full"}).encode())

    async def run() -> None:
        async with gateway(Scripted(full)) as live:
            status, said = await live.post({"model": "m", "prompt": "hi"})
            assert (status, live.headers["retry-after"]) == (503, "1")
            assert said == b'{"error": "full"}'

    asyncio.run(run())
