"""Faults around the gateway: a flood, keys in logs, services that are gone, answers for another model, clocks."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.live import Received, Scripted, answer, gateway, says
from tests.gateway.services import postgres_server, redis_server
from tests.gateway.test_ledger import totals
from tests.gateway.test_tenants import config, make_keys, rows

from quire.http.keys import ApiKey, create_key, read_keys

BODY = {"model": "m", "prompt": "hi", "max_tokens": 4}


def run(coroutine: Any) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 120))


def test_a_flood_of_one_tenant_leaves_the_others_alone(tmp_path: Path) -> None:
    keys = make_keys(tmp_path, flood={})
    created = next(iter(read_keys(tmp_path / "keys").keys.values())).created
    keys["calm"] = "Bearer " + create_key(tmp_path / "keys", ApiKey("calm", "other", "", created=created))
    most, now = 0, 0

    async def slow(request: Received, writer: asyncio.StreamWriter) -> None:
        nonlocal most, now
        now += "flood" in request.body["prompt"]
        most = max(most, now)
        await asyncio.sleep(0.02)
        now -= "flood" in request.body["prompt"]
        await answer(writer, 200, b'{"usage": {"prompt_tokens": 1, "completion_tokens": 1}}')

    async def main() -> None:
        limits = {"tenants": {"lab": {"concurrent_requests": 4}}}
        async with gateway(Scripted(slow), **config(tmp_path, limits=limits)) as live:
            seen: dict[str, Counter[int]] = {"flood": Counter(), "calm": Counter()}

            async def ask(name: str) -> None:
                body = BODY | {"prompt": name}
                headers = {"authorization": keys[name]}
                async with live.session.post(
                    live.url + "/v1/completions", json=body, headers=headers
                ) as response:
                    seen[name][response.status] += 1
                    assert response.status == 200 or int(response.headers["retry-after"]) >= 1

            floods = [asyncio.create_task(ask("flood")) for _ in range(300)]
            for _ in range(10):
                await ask("calm")
            await asyncio.gather(*floods)
            assert seen["calm"] == {200: 10}
            assert set(seen["flood"]) == {200, 429}
            assert seen["flood"].total() == 300

    run(main())
    assert most <= 4


def test_no_key_is_in_a_log_or_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = make_keys(tmp_path, alice={})
    secrets = {"gateway_key": "sk-between-1234", "admin_key": "sk-admin-1234"}

    async def dies(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def main() -> None:
        backend = Scripted(dies)
        async with gateway(backend, **config(tmp_path, access_log=True), **secrets) as live:
            for body in (BODY, BODY | {"model": "none"}, b"{", BODY | {"stream": True}):
                _, said = await live.post(body, authorization=keys["alice"])
                assert keys["alice"].removeprefix("Bearer ").encode() not in said
            for path in ("/admin/backends", "/admin/routing", "/metrics", "/v1/models"):
                for key in (secrets["admin_key"], keys["alice"].removeprefix("Bearer "), "wrong"):
                    headers = {"authorization": f"Bearer {key}"}
                    async with live.session.get(live.url + path, headers=headers) as response:
                        said = await response.read()
                        assert not [each for each in secrets.values() if each.encode() in said]

    with caplog.at_level("DEBUG"):
        run(main())
    logged = caplog.text + str([record.__dict__ for record in caplog.records])
    assert "attempt_failed" in logged
    for secret in (*secrets.values(), keys["alice"].removeprefix("Bearer ")):
        assert secret not in logged


@pytest.mark.slow
def test_requests_go_on_while_redis_and_postgres_are_gone(tmp_path: Path) -> None:
    keys = make_keys(tmp_path, alice={})

    async def main(postgres: Any, redis: Any) -> None:
        settings = {"ledger": postgres.url, "ledger_spool": str(tmp_path / "spool"), "redis": redis.url}
        settings |= {"key_file": str(tmp_path / "keys"), "limits": {"requests_per_minute": 100_000}}
        async with gateway(Scripted(says("ok")), **settings) as live:

            async def ask(count: int) -> None:
                for _ in range(count):
                    status, _ = await live.post(BODY, authorization=keys["alice"])
                    assert status == 200

            await ask(20)
            await asyncio.to_thread(postgres.stop)
            redis.kill()
            await ask(60)
            await asyncio.sleep(0.5)
            assert (tmp_path / "spool").exists()
            await ask(20)
            await asyncio.to_thread(postgres.start)
            redis.start()
            await ask(20)
            await live.until(lambda: not (tmp_path / "spool").exists())

    with postgres_server() as postgres, redis_server() as redis:
        run(main(postgres, redis))
        assert totals(postgres.url)["requests"] == 120
        assert totals(postgres.url)["output_tokens"] == 240


def test_an_answer_for_another_model_is_booked_as_asked(tmp_path: Path) -> None:
    async def other(request: Received, writer: asyncio.StreamWriter) -> None:
        value = {"id": "c-1", "model": "m-2026", "usage": {"prompt_tokens": 5, "completion_tokens": 2}}
        await answer(writer, 200, json.dumps(value).encode())

    async def main() -> None:
        async with gateway(
            Scripted(other), ledger=str(tmp_path / "ledger.sqlite"), prices={"m": {"output": 1.0}}
        ) as live:
            status, said = await live.post(BODY)
            assert (status, json.loads(said)["model"]) == (200, "m-2026")

    run(main())
    assert rows(tmp_path)["ok"]["price_nano"] == 2_000


def test_a_body_beyond_its_limit_reaches_no_backend() -> None:
    async def main() -> None:
        backend = Scripted(says("x"))
        async with gateway(backend, max_body_mib=1) as live:
            status, said = await live.post(BODY | {"prompt": "x" * (2 << 20)})
            assert (status, b"max_body_mib" in said) == (413, True)
            assert not backend.received
            assert (await live.post(BODY))[0] == 200

    run(main())


@pytest.mark.parametrize("jump_s", [-3600.0, 86_400.0])
def test_a_jump_of_the_systems_time_disturbs_no_request(
    jump_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unix = time.time

    async def main() -> None:
        settings = {"ledger": str(tmp_path / "ledger.sqlite"), "limits": {"requests_per_minute": 5}}
        async with gateway(Scripted(says("ok")), **settings) as live:
            assert [(await live.post(BODY))[0] for _ in range(4)] == [200] * 4
            monkeypatch.setattr(time, "time", lambda: unix() + jump_s)
            assert (await live.post(BODY))[0] == 200
            assert (await live.post(BODY))[0] == 429  # a jump gives no rate back
            assert all(backend.is_ready for backend in live.state.fleet)

    run(main())
    assert rows(tmp_path)[""]["requests"] == 6
