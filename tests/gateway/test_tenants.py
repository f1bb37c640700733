"""Keys, limits and the ledger in the walk of a request, over real sockets."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.live import Received, Scripted, begin_stream, chunk, frame, gateway, says

from quire.http.keys import ApiKey, create_key, revoke_key
from quire_gateway.ledger_database import open_database
from quire_gateway.ledger_report import report


def make_keys(folder: Path, **rights: dict[str, Any]) -> dict[str, str]:
    """Create a key for each name; return name → the header that carries it."""
    now = datetime.now(UTC)
    return {
        name: "Bearer " + create_key(folder / "keys", ApiKey(name, "lab", "", created=now, **values))
        for name, values in rights.items()
    }


def rows(folder: Path) -> dict[str, Any]:
    """Return the sums of the ledger by outcome, and all of them under ""."""
    database = open_database(str(folder / "ledger.sqlite"))
    found = {line["outcome"]: line for line in report(database, ["outcome"])}
    found[""] = report(database, [])[0]
    database.close()
    return found


def config(folder: Path, **more: Any) -> dict[str, Any]:
    return {"key_file": str(folder / "keys"), "ledger": str(folder / "ledger.sqlite")} | more


def test_a_key_has_its_rights(tmp_path: Path) -> None:
    keys = make_keys(
        tmp_path,
        all={},
        small={"models": ("s*",)},
        chat={"endpoints": ("/v1/chat/*",)},
        old={"expires": datetime(2020, 1, 1, tzinfo=UTC)},
    )

    async def run() -> None:
        async with gateway(Scripted(says("hello")), **config(tmp_path)) as live:
            body = {"model": "m", "prompt": "hi"}
            assert (await live.post(body))[0] == 401
            assert (await live.post(body, authorization="Bearer sk-quire-x"))[0] == 401
            assert (await live.post(body, authorization=keys["all"]))[0] == 200
            assert (await live.post(body, x_api_key=keys["all"].removeprefix("Bearer ")))[0] == 200
            status, answer = await live.post(body, authorization=keys["small"])
            assert (status, json.loads(answer)["error"]["param"]) == (404, "model")
            assert (await live.post(body, authorization=keys["chat"]))[0] == 403
            assert (await live.post(body, "/v1/chat/completions", authorization=keys["chat"]))[0] == 200
            status, answer = await live.post(body, authorization=keys["old"])
            assert status == 401
            assert b"expired" in answer
            revoke_key(tmp_path / "keys", "all")
            await asyncio.sleep(1.1)
            assert (await live.post(body, authorization=keys["all"]))[0] == 401

    asyncio.run(run())


def test_the_clients_key_goes_no_further(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = make_keys(tmp_path, alice={})
    backend = Scripted(says("hello"))

    async def run() -> None:
        async with gateway(backend, **config(tmp_path, access_log=True)) as live:
            await live.post({"model": "m", "prompt": "hi"}, authorization=keys["alice"])
            await live.post({"model": "m", "prompt": 5, "max_tokens": "x"}, authorization=keys["alice"])

    with caplog.at_level("DEBUG"):
        asyncio.run(run())
    secret = keys["alice"].removeprefix("Bearer ")
    assert secret not in str(backend.received)
    assert secret not in caplog.text + str([record.__dict__ for record in caplog.records])
    assert "alice" in str([record.__dict__ for record in caplog.records])


def test_limits_refuse_before_a_model_is_touched(tmp_path: Path) -> None:
    keys = make_keys(tmp_path, alice={}, bob={})
    backend = Scripted(says("hello"))
    limits = {"tenants": {"lab": {"requests_per_minute": 3}}, "keys": {"bob": {"tokens_per_day": 50}}}

    async def run() -> None:
        async with gateway(backend, **config(tmp_path, limits=limits)) as live:
            body = {"model": "m", "prompt": "hi", "max_tokens": 30}
            assert (await live.post(body, authorization=keys["bob"]))[0] == 200
            assert live.headers["x-ratelimit-limit-requests"] == "3"
            assert live.headers["x-ratelimit-remaining-requests"] == "2"
            assert "x-quire-route" not in live.headers
            # Each uses 5 + 5 of 50 tokens and reserves about 36; 200 never fit.
            assert (await live.post(body, authorization=keys["bob"], x_quire_explain="1"))[0] == 200
            assert live.headers["x-ratelimit-remaining-requests"] == "1"
            assert live.headers["x-quire-backend"] == "b0"
            status, answer = await live.post(body, authorization=keys["bob"])
            assert (status, json.loads(answer)["error"]["code"]) == (429, "insufficient_quota")
            assert int(live.headers["retry-after"]) > 0
            status, answer = await live.post(body | {"max_tokens": 200}, authorization=keys["bob"])
            assert (status, json.loads(answer)["error"]["code"]) == (429, "request_too_large")
            assert "retry-after" not in live.headers
            assert (await live.post(body, authorization=keys["alice"]))[0] == 200
            status, answer = await live.post(body, authorization=keys["alice"])
            assert (status, json.loads(answer)["error"]["code"]) == (429, "rate_limit_exceeded")
            assert "tenant/lab/requests_per_minute allows 3" in json.loads(answer)["error"]["message"]
            assert 1 <= int(live.headers["retry-after"]) <= 20

    asyncio.run(run())
    assert len(backend.received) == 3
    assert rows(tmp_path)[""]["output_tokens"] == 15


def test_every_request_has_one_row(tmp_path: Path) -> None:
    keys = make_keys(tmp_path, alice={})
    name = {"authorization": keys["alice"], "x_request_id": "the-same"}
    prices = {"m": {"input": 1.0, "output": 2.0}}

    async def run() -> None:
        async with gateway(Scripted(says("hello")), **config(tmp_path, prices=prices)) as live:
            body = {"model": "m", "prompt": "hi"}
            for _ in range(3):
                assert (await live.post(body, **name))[0] == 200
            status, _ = await live.post(body | {"stream": True}, **name)
            assert status == 200
            assert (await live.post({"model": "other"}, **name))[0] == 404
            assert (await live.post({"model": "m", "stream": "yes"}, **name))[0] == 400

    asyncio.run(run())
    found = rows(tmp_path)
    assert (found["ok"]["requests"], found["ok"]["prompt_tokens"], found["ok"]["output_tokens"]) == (
        4,
        20,
        20,
    )
    assert found["ok"]["price_nano"] == 4 * (5 * 1000 + 5 * 2000)
    assert found[""]["prompt_tokens"] == 20


def asks_for_usage(received: Received) -> bool:
    return bool((received.body.get("stream_options") or {}).get("include_usage"))


async def chat(request: Received, writer: asyncio.StreamWriter) -> None:
    """A chat of three tokens as OpenAI streams it: usage in a last chunk, if the request asks for it."""
    await begin_stream(writer)
    for letter in "abc":
        await chunk(writer, frame({"id": "c", "choices": [{"index": 0, "delta": {"content": letter}}]}))
    if asks_for_usage(request):
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
        await chunk(writer, frame({"id": "c", "choices": [], "usage": usage}))
    await chunk(writer, b"data: [DONE]\n\n")
    await chunk(writer, b"")


def test_usage_is_counted_and_not_shown_unasked(tmp_path: Path) -> None:
    keys = make_keys(tmp_path, alice={})
    backend = Scripted(chat)
    answers: list[bytes] = []

    async def run() -> None:
        async with gateway(backend, **config(tmp_path)) as live:
            body = {"model": "m", "messages": [], "stream": True}
            for options in ({}, {"stream_options": {"include_usage": True}}):
                answer = await live.post(body | options, "/v1/chat/completions", authorization=keys["alice"])
                answers.append(answer[1])

    asyncio.run(run())
    assert b"usage" not in answers[0]
    assert answers[0].count(b"data:") == 4
    assert answers[1].count(b"data:") == 5
    assert all(map(asks_for_usage, backend.received))
    assert rows(tmp_path)["ok"]["output_tokens"] == 6
    assert rows(tmp_path)["ok"]["cached_tokens"] == 8


async def breaks(request: Received, writer: asyncio.StreamWriter) -> None:
    await begin_stream(writer)
    for letter in "ab":
        await chunk(writer, frame({"id": "c", "choices": [{"text": letter}]}))
    writer.close()


def test_a_broken_stream_is_counted_by_its_events(tmp_path: Path) -> None:
    keys = make_keys(tmp_path, alice={})

    async def run() -> None:
        async with gateway(Scripted(breaks), **config(tmp_path)) as live:
            body = {"model": "m", "prompt": "x" * 400, "stream": True}
            assert b'"error"' in (await live.post(body, authorization=keys["alice"]))[1]

    asyncio.run(run())
    found = rows(tmp_path)["broken"]
    assert found["requests"] == 1
    assert found["output_tokens"] == 2
    assert 90 < found["prompt_tokens"] < 120
