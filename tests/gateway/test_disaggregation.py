"""Two calls of one prompt: which replica gets which, when there is one, and what a first call that fails costs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.gateway.live import Live, Received, Script, Scripted, answer, backends, gateway_of, says

from quire.errors import ConfigError
from quire_gateway.config_file import gateway_config
from quire_gateway.ledger_database import open_database
from quire_gateway.ledger_report import report

LONG = "It was a dark and stormy night, and the rain fell in torrents. " * 50
BODY = {"model": "m", "prompt": LONG, "stream": True}
PARAMS = {"do_remote_prefill": True, "remote_engine_id": "e1", "remote_block_ids": [0, 1]}


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


def computes(params: Mapping[str, Any] | None = PARAMS, status: int = 200) -> Script:
    """Answer the first call with ``params``, and any other as `says`."""

    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        if "kv_transfer_params" not in request.body:
            await says("whole")(request, writer)
            return
        value = {"choices": [], "usage": {"prompt_tokens": 800}} | (
            {"kv_transfer_params": params} if params else {}
        )
        await answer(writer, status, json.dumps(value).encode())

    return script


@asynccontextmanager
async def pools(
    prefill: Scripted,
    *decode: Scripted,
    roles: tuple[str, ...] = ("prefill", "decode", "decode"),
    **settings: Any,
) -> AsyncGenerator[Live, None]:
    async with backends(prefill, *decode):
        scripted = [prefill, *decode]
        named = [
            {"name": f"b{i}", "url": each.url, "role": role}
            for i, (each, role) in enumerate(zip(scripted, roles, strict=False))
        ]
        config = {"backends": named, "health": {"interval_s": 0.05, "slow_start_s": 0.0}} | settings
        async with gateway_of(config) as live:
            yield live


def calls_of(scripted: Scripted) -> list[Any]:
    return [each.body.get("kv_transfer_params") for each in scripted.received]


def test_a_long_prompt_is_computed_by_one_and_answered_by_another(tmp_path: Any) -> None:
    async def main() -> None:
        prefill, decode, ledger = Scripted(computes()), Scripted(says("hey")), str(tmp_path / "ledger.sqlite")
        async with pools(prefill, decode, ledger=ledger) as live:
            status, body = await live.post(BODY, x_quire_explain="1")
            assert (status, body.count(b'"text"')) == (200, 3)
            assert live.headers["x-quire-backend"] == "b1"
            assert calls_of(prefill) == [{"do_remote_decode": True}]
            assert calls_of(decode) == [PARAMS]
            first, second = prefill.received[0].body, decode.received[0].body
            assert first["prompt"] == second["prompt"] == LONG
            assert [load.requests for load in live.state.router.loads] == [0, 0]
            assert [load.queued_tokens for load in live.state.router.loads] == [0, 0]
            async with live.session.get(live.url + "/metrics") as response:
                text = await response.text()
            assert 'quire:gateway_prefills_total{backend="b0",result="computed"} 1.0' in text
        database = open_database(ledger)
        (row,) = report(database, ["backend"])
        database.close()
        assert (row["backend"], row["requests"]) == ("b1", 1), "it is billed once"

    run(main())


def test_a_first_call_is_not_booked_at_its_replica() -> None:
    """Else a gateway that was killed would bill the request by it, without its output."""

    async def main() -> None:
        prefill, decode = (Scripted(each, card={"fingerprint": "f"}) for each in (computes(), says("hey")))
        async with pools(prefill, decode, gateway_key="between-us") as live:
            assert (await live.post(BODY | {"stream": False}))[0] == 200
            first, second = prefill.received[0].headers, decode.received[0].headers
            assert first["x-quire-second"] == "1"
            assert "x-quire-second" not in second
            assert first["x-quire-account"] == second["x-quire-account"]

    run(main())


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "Hi"},
        {"prompt": [LONG, LONG]},
        {"kv_transfer_params": {"do_remote_prefill": False}},
    ],
    ids=["short", "several", "by the client"],
)
def test_a_request_that_gains_nothing_has_one_call(change: dict[str, Any]) -> None:
    async def main() -> None:
        prefill, decode = Scripted(computes()), Scripted(says("hey"))
        async with pools(prefill, decode) as live:
            assert (await live.post(BODY | change))[0] == 200
            assert not prefill.received
            assert calls_of(decode) == [change.get("kv_transfer_params")]

    run(main())


def test_what_the_decode_replica_has_stays_there() -> None:
    async def main() -> None:
        prefill, decode = Scripted(computes()), Scripted(says("hey"))
        async with pools(prefill, decode, disaggregation={"min_tokens": 1}) as live:
            for _ in range(2):
                assert (await live.post(BODY))[0] == 200
            assert len(prefill.received) == 1
            assert calls_of(decode) == [PARAMS, None]

    run(main())


def test_a_queue_at_the_prefill_replicas_is_not_waited_for() -> None:
    async def main() -> None:
        prefill, decode = Scripted(computes()), Scripted(says("hey"))
        async with pools(prefill, decode) as live:
            live.state.router.loads[0].queued_tokens = 1_000_000
            assert (await live.post(BODY))[0] == 200
            assert not prefill.received

    run(main())


async def dies(request: Received, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def hangs(request: Received, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(30.0)


@pytest.mark.parametrize(
    "script",
    [
        dies,
        hangs,
        computes(None),
        computes(status=500),
        computes(status=400),
        computes({"a": "b" * 2_000_000}),
    ],
    ids=["dies", "hangs", "no params", "error", "refusal", "too large"],
)
def test_a_first_call_that_fails_costs_a_computation(script: Script) -> None:
    async def main() -> None:
        prefill, decode = Scripted(script), Scripted(says("hey"))
        async with pools(prefill, decode, disaggregation={"timeout_s": 0.3}) as live:
            status, body = await live.post(BODY)
            assert (status, body.count(b'"text"')) == (200, 3)
            assert calls_of(decode) == [None]
            assert [load.requests for load in live.state.router.loads] == [0, 0]

    run(main())


def test_a_prefill_replica_that_polls_find_lost_is_left() -> None:
    async def main() -> None:
        prefill, decode = Scripted(hangs), Scripted(says("hey"))
        health = {"interval_s": 0.05, "slow_start_s": 0.0, "timeout_s": 0.2}
        async with pools(prefill, decode, health=health) as live:
            asking = asyncio.create_task(live.post(BODY))
            await live.until(lambda: len(prefill.received) == 1)
            prefill.is_silent = True
            assert (await asking)[0] == 200
            assert calls_of(decode) == [None]

    run(main())


def test_a_client_that_leaves_ends_the_first_call() -> None:
    async def main() -> None:
        async def waits(request: Received, writer: asyncio.StreamWriter) -> None:
            while not writer.is_closing():
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                await writer.drain()
                await asyncio.sleep(0.02)

        prefill, decode = Scripted(waits), Scripted(says("hey"))
        async with pools(prefill, decode) as live:
            asking = asyncio.create_task(live.post(BODY))
            await live.until(lambda: len(prefill.received) == 1)
            asking.cancel()
            await live.until(lambda: prefill.num_left == 1)
            await live.until(lambda: [load.requests for load in live.state.router.loads] == [0, 0])
            assert not decode.received

    run(main())


def test_a_second_decode_replica_goes_on_with_the_same_params() -> None:
    async def main() -> None:
        prefill, one, two = Scripted(computes()), Scripted(dies), Scripted(dies)
        async with pools(prefill, one, two, routing={"policy": "round-robin"}) as live:
            two.script = says("hey")
            if not one.received and not two.received:
                assert (await live.post(BODY))[0] == 200
            assert len(prefill.received) == 1
            assert [PARAMS] * len(one.received) == calls_of(one)
            assert calls_of(two) == [PARAMS]

    run(main())


def test_prefill_replicas_answer_where_no_other_can() -> None:
    async def main() -> None:
        prefill, decode = Scripted(computes()), Scripted(says("hey"))
        async with pools(prefill, decode) as live:
            decode.ready = False
            await live.until(lambda: not live.state.fleet.named("b1").is_ready)
            assert (await live.post(BODY))[0] == 200
            assert calls_of(prefill) == [None]

    run(main())


def test_a_role_changes_while_requests_run() -> None:
    async def main() -> None:
        one, two = Scripted(computes()), Scripted(computes())
        async with pools(
            one,
            two,
            roles=("both", "decode"),
            disaggregation={"min_tokens": 1},
            routing={"policy": "round-robin"},
        ) as live:
            for role, num_first in (("both", 0), ("prefill", 1)):
                patch = live.session.patch(live.url + "/admin/backends/b0", json={"role": role})
                async with patch as response:
                    assert (await response.json())["role"] == role
                for number in range(2):
                    assert (await live.post(BODY | {"prompt": f"{role} {number} {LONG}"}))[0] == 200
                assert sum(call is not None for call in calls_of(one)) == 2 * num_first
            async with live.session.patch(live.url + "/admin/backends/b0", json={}) as response:
                assert response.status == 400

    run(main())


def test_without_roles_there_is_no_stage() -> None:
    assert gateway_config({"backends": [{"url": "http://a"}]}).disaggregation is None
    assert gateway_config({"disaggregation": {}}).disaggregation is not None
    with pytest.raises(ConfigError, match="role"):
        gateway_config({"backends": [{"url": "http://a", "role": "other"}]})
