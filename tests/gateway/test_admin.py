"""The admin surface and what can be seen of the gateway: keys, limits, metrics, traces, the access log, proxies."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.gateway.live import Live, Scripted, gateway, says
from tools.house import ROOT

from quire.errors import ConfigError
from quire_gateway import metrics
from quire_gateway.app import POST_PATHS
from quire_gateway.config_file import gateway_config
from quire_gateway.metrics import GatewayMetrics

ASK = {"model": "m", "prompt": "hi", "max_tokens": 10}


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


async def admin(live: Live, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    headers = {"authorization": "Bearer root"}
    async with live.session.request(method, live.url + path, json=body, headers=headers) as response:
        return response.status, await response.json()


def test_keys_are_made_listed_rotated_and_revoked(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"#quire-keys 1 {'0' * 64}\n")

    async def main() -> None:
        settings = {"key_file": str(file), "admin_key": "root", "access_log": True}
        async with gateway(Scripted(says("x")), **settings) as live:
            assert (await live.post(ASK))[0] == 401
            status, made = await admin(live, "POST", "/admin/keys", {"name": "alice", "models": ["m*"]})
            assert (status, made["tenant"], made["models"]) == (201, "alice", ["m*"])
            bearer = "Bearer " + made["key"]
            await live.until_post(ASK, 200, authorization=bearer)
            status, rotated = await admin(live, "POST", "/admin/keys/alice/rotate")
            assert status == 200
            assert rotated["key"] != made["key"]
            await live.until_post(ASK, 401, authorization=bearer)
            await live.until_post(ASK, 200, authorization="Bearer " + rotated["key"])
            status, listed = await admin(live, "GET", "/admin/keys")
            assert [each["name"] for each in listed["data"]] == ["alice"]
            hidden = (made["key"], rotated["key"], "0" * 64, file.read_text().split()[5])
            for path in ("/admin/keys", "/admin/backends", "/admin/limits", "/admin/routing"):
                shown = json.dumps((await admin(live, "GET", path))[1])
                assert not [each for each in hidden if each in shown]
            assert (await admin(live, "DELETE", "/admin/keys/alice"))[0] == 200
            await live.until_post(ASK, 401, authorization="Bearer " + rotated["key"])
            for method, path, body, expected in (
                ("DELETE", "/admin/keys/alice", None, 404),
                ("POST", "/admin/keys/bob/rotate", None, 404),
                ("POST", "/admin/keys", {"name": "a b"}, 400),
                ("POST", "/admin/keys", {"name": "bob", "models": ["a b"]}, 400),
                ("POST", "/admin/keys", {"name": "bob", "expires": "soon"}, 400),
                ("POST", "/admin/keys", {"name": "bob", "weight": -1.0}, 400),
            ):
                assert (await admin(live, method, path, body))[0] == expected
            async with live.session.get(live.url + "/admin/keys") as response:
                assert response.status == 401

    run(main())


def test_without_a_key_file_there_are_no_keys() -> None:
    async def main() -> None:
        async with gateway(Scripted(says("x"))) as live:
            assert (await admin(live, "GET", "/admin/keys"))[0] == 409
            assert (await admin(live, "GET", "/admin/limits"))[0] == 200

    run(main())


def test_limits_show_what_is_left() -> None:
    async def main() -> None:
        limits = {
            "requests_per_minute": 10,
            "money_per_day": 2.5,
            "concurrent_requests": 4,
            "models": {"m": {"tokens_per_day": 100}},
        }
        async with gateway(Scripted(says("hello")), limits=limits, prices={"m": {"output": 1e5}}) as live:
            assert (await live.post(ASK))[0] == 200
            _, shown = await admin(live, "GET", "/admin/limits")
            assert shown["default"] == {
                "requests_per_minute": 10,
                "money_per_day": 2.5,
                "concurrent_requests": 4,
            }
            left = {each["name"]: each["remaining"] for each in shown["quotas"]}
            assert left["key//money_per_day"] == 2.0
            assert left["key//requests_per_minute"] == 9
            assert left["key//concurrent_requests"] == 4
            assert left["tenant//m/tokens_per_day"] == 90
            again = (await admin(live, "GET", "/admin/limits"))[1]["quotas"]
            assert {each["name"]: each["remaining"] for each in again} == left  # looking takes nothing

    run(main())


def test_metrics_by_backend_and_tenant() -> None:
    async def main() -> None:
        async with gateway(Scripted(says("hello")), admin_key="root") as live:
            await live.post(ASK)
            text = await scraped(live, "root")
            for line in (
                'quire:gateway_tenant_requests_total{outcome="ok",tenant=""} 1.0',
                'quire:gateway_tenant_tokens_total{kind="output",tenant=""} 5.0',
                'envoy_cluster_membership_healthy{envoy_cluster_name="m"} 1.0',
                'envoy_cluster_upstream_rq_active{backend="b0"} 0.0',
                'vllm:num_prefill_requests{server="b0"} 0.0',
            ):
                assert line in text

    run(main())


async def scraped(live: Live, key: str | None) -> str:
    headers = {"authorization": f"Bearer {key}"} if key is not None else {}
    async with live.session.get(live.url + "/metrics", headers=headers) as response:
        assert response.status == 200
        return await response.text()


def test_tenants_in_metrics_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_TENANTS", 2)
    counts = GatewayMetrics(None, None)  # type: ignore[arg-type]
    assert [counts._tenant(name) for name in ("a", "b", "c", "a", "d")] == ["a", "b", "other", "a", "other"]


def test_a_trace_is_passed_on_or_begun() -> None:
    async def main() -> None:
        backend = Scripted(says("x"))
        async with gateway(backend) as live:
            given = f"00-{'a' * 32}-{'b' * 16}-00"
            await live.post(ASK, traceparent=given, tracestate="v=1")
            await live.post(ASK)
            first, second = (each.headers for each in backend.received)
            assert (first["traceparent"], first["tracestate"]) == (given, "v=1")
            assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01", second["traceparent"])

    run(main())


def test_the_access_log_has_a_json_line_per_request(tmp_path: Path) -> None:
    file = tmp_path / "access.jsonl"

    async def main() -> None:
        backend = Scripted(says("hello"))
        async with gateway(backend, access_log_file=str(file)) as live:
            await live.post(ASK | {"stream": True}, x_request_id="one")
            await live.until(file.exists)
            file.rename(tmp_path / "old")
            await live.post({"model": "other"}, x_request_id="two")
        trace = backend.received[0].headers["traceparent"].split("-")[1]
        (old,), (new,) = (
            [json.loads(x) for x in p.read_text().splitlines()] for p in (tmp_path / "old", file)
        )
        assert (old["request_id"], old["trace_id"], old["backend"]) == ("one", trace, "b0")
        assert (old["status"], old["outcome"], old["output_tokens"], old["stream"]) == (200, "ok", 5, True)
        assert (new["request_id"], new["status"], new["outcome"], new["backend"]) == (
            "two",
            404,
            "refused",
            None,
        )

    run(main())


@pytest.mark.parametrize("trusted", [False, True])
def test_a_forwarded_address_is_believed_only_of_proxies(trusted: bool, tmp_path: Path) -> None:
    file = tmp_path / "access.jsonl"

    async def main() -> None:
        backend = Scripted(says("x"))
        settings = {"forwarded_allow_ips": ["127.0.0.0/8"]} if trusted else {}
        async with gateway(backend, access_log_file=str(file), **settings) as live:
            await live.post(ASK, x_forwarded_for="10.9.8.7")
            sent = backend.received[0].headers["x-forwarded-for"]
            assert sent == ("10.9.8.7, 10.9.8.7" if trusted else "10.9.8.7, 127.0.0.1")
        assert json.loads(file.read_text())["client"] == ("10.9.8.7" if trusted else "127.0.0.1")

    run(main())


def test_a_wrong_proxy_address_is_named() -> None:
    with pytest.raises(ConfigError, match="'front' must be an address or a network"):
        gateway_config({"forwarded_allow_ips": ["front"]})


def test_the_example_for_envoy_reaches_the_gateway() -> None:
    example = yaml.safe_load((ROOT / "deploy" / "envoy" / "envoy.yaml").read_text())["static_resources"]
    (cluster,) = example["clusters"]
    address = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"]
    assert address["socket_address"]["port_value"] == gateway_config({}).server.port
    manager = example["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    routes = manager["route_config"]["virtual_hosts"][0]["routes"]
    assert routes[-1]["route"] == {"cluster": cluster["name"], "timeout": "0s"}
    assert manager["upgrade_configs"] == [{"upgrade_type": "websocket"}]
    proto = (ROOT / "deploy" / "envoy" / "quire.proto").read_text()
    assert set(re.findall(r'post: "([^"]+)"', proto)) <= set(POST_PATHS)
