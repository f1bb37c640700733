"""Ids with a tag of their tenant, and salts by tenant, at backends that know neither."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.live import (
    Live,
    Received,
    Scripted,
    answer,
    backends,
    begin_stream,
    chunk,
    frame,
    gateway,
    gateway_of,
    says,
)

from quire.http.keys import ApiKey, create_key, revoke_key
from quire_gateway.config import GatewayArgs
from quire_gateway.ownership import Owner, Tenancy
from quire_gateway.sealed import Sealing

VLLM = {"owned_by": "vllm"}
TEXT = "a long text that two tenants may send " * 100


def make_keys(folder: Path, *tenants: str, group: str = "") -> dict[str, str]:
    """Create a key for each tenant; return tenant → the header that carries it."""
    made = {}
    for tenant in tenants:
        key = ApiKey(tenant, tenant, "", created=datetime.now(UTC), cache_group=group)
        made[tenant] = "Bearer " + create_key(folder / "keys", key)
    return made


def owner_of(folder: Path, tenant: str, **args: Any) -> Owner:
    """As a gateway that has just started sees the tenant."""
    return Tenancy(GatewayArgs(key_file=str(folder / "keys"), **args), lambda: 0.0).owner(tenant)


def test_an_id_is_taken_from_its_tenant_alone(tmp_path: Path) -> None:
    make_keys(tmp_path, "lab", "shop")
    lab, shop = owner_of(tmp_path, "lab"), owner_of(tmp_path, "shop")
    shown = lab.seal("resp_1-2")
    assert shown.startswith("resp_1-2-")
    assert len(lab.seal("msg_" + "0" * 32)) <= 64, "OpenAI's limit of an item's id"
    assert owner_of(tmp_path, "lab").open(shown) == "resp_1-2", "a gateway that starts again takes it"
    wrong = ["resp_1-2", "", "-", shown[:-1], shown + "0", shown.replace("1", "3", 1), shown.upper(), "é-é"]
    assert [lab.open(each) for each in wrong] == [None] * len(wrong)
    assert [owner.open(shown) for owner in (shop, owner_of(tmp_path, ""))] == [None, None]
    revoke_key(tmp_path / "keys", "shop")
    assert owner_of(tmp_path, "lab").open(shown) == "resp_1-2", "one tenant is left, and keeps its responses"


def test_the_secret_is_that_of_the_key_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        make_keys(tmp_path / name, "lab", "shop")
    shown = owner_of(tmp_path / "a", "lab").seal("resp_1")
    assert owner_of(tmp_path / "b", "lab").open(shown) is None


def test_one_tenant_sees_ids_as_they_are(tmp_path: Path) -> None:
    make_keys(tmp_path, "lab")
    lab = owner_of(tmp_path, "lab")
    assert lab.seal("resp_1") == lab.open("resp_1") == "resp_1"
    with_others = owner_of(tmp_path, "lab", api_keys=("sk-static",))
    assert with_others.seal("resp_1") != "resp_1", "keys without a tenant are one more"


def test_only_ids_are_written_anew(tmp_path: Path) -> None:
    make_keys(tmp_path, "lab", "shop")
    lab = owner_of(tmp_path, "lab")
    text = r"say \"id\":\"resp_1\" 1e400"
    body = '{"id":"resp_1","n":1.0,"text":"%s","metadata":{"id":"resp_1"},"output":[{"id":"msg_1","id2":"msg_1"}]}'
    sealed = Sealing(lab).sealed_body(200, (body % text).encode()).decode()
    expected = (
        '{"id":"%s","n":1.0,"text":"%s","metadata":{"id":"resp_1"},"output":[{"id":"%s","id2":"msg_1"}]}'
    )
    assert sealed == expected % (lab.seal("resp_1"), text, lab.seal("msg_1"))
    for other in (b"not JSON", b"[1]", b'{"id":5}', b""):
        assert Sealing(lab).sealed_body(200, other) == other
    event = b'event: response.created\ndata: {"response":{"id":"resp_1","previous_response_id":null}}\n\n'
    assert Sealing(lab).frames(event) == event.replace(b"resp_1", lab.seal("resp_1").encode())
    assert Sealing(lab).frames(b': id"\n\ndata: [DONE]\n\n') == b': id"\n\ndata: [DONE]\n\n'


async def stored(request: Received, writer: asyncio.StreamWriter) -> None:
    """A backend that stores responses for all who ask."""
    if request.method == "POST" and request.path == "/v1/responses" and request.body.get("stream"):
        await begin_stream(writer)
        response = {"id": "resp_1", "output": [], "previous_response_id": None}
        await chunk(writer, frame({"type": "response.created", "response": response}))
        await chunk(
            writer, frame({"type": "response.output_text.delta", "item_id": "msg_1", "delta": "resp_1"})
        )
        response["output"] = [{"id": "msg_1"}]
        await chunk(writer, frame({"type": "response.completed", "response": response}))
        await chunk(writer, b"")
        return
    if request.method == "POST" and request.path == "/v1/responses" and request.body.get("input") == "fail":
        error = f"{request.body['previous_response_id']} is gone"
        await answer(writer, 400, json.dumps({"error": {"message": error}}).encode())
        return
    if request.path.endswith("/input_items"):
        await answer(
            writer, 200, b'{"data":[{"id":"msg_0"}],"first_id":"msg_0","last_id":"msg_0","has_more":false}'
        )
        return
    previous = request.body.get("previous_response_id") if request.method == "POST" else None
    value = {"id": "resp_1", "output": [{"id": "msg_1"}], "previous_response_id": previous}
    await answer(writer, 200, json.dumps(value).encode())


@asynccontextmanager
async def running(folder: Path, *scripted: Scripted, **settings: Any) -> AsyncGenerator[Live, None]:
    async with gateway(*scripted, key_file=str(folder / "keys"), **settings) as live:
        yield live


async def ask(live: Live, key: str, method: str, path: str) -> tuple[int, Any]:
    async with live.session.request(method, live.url + path, headers={"authorization": key}) as response:
        return response.status, await response.json()


def test_a_backend_without_tenants_is_asked_for_own_ids_alone(tmp_path: Path) -> None:
    keys, backend = make_keys(tmp_path, "lab", "shop"), Scripted(stored)

    async def run() -> None:
        async with running(tmp_path, backend) as live:
            status, raw = await live.post(
                {"model": "m", "input": "hi"}, "/v1/responses", authorization=keys["lab"]
            )
            made = json.loads(raw)
            assert status == 200
            assert made["id"].startswith("resp_1-")
            backend.received.clear()
            path = f"/v1/responses/{made['id']}"
            for method, end in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
                assert (await ask(live, keys["shop"], method, path + end))[0] == 404
                assert (await ask(live, keys["lab"], method, "/v1/responses/resp_1" + end))[0] == 404
            for wrong in ({"previous_response_id": made["id"]}, {"previous_response_id": "resp_1"}):
                body = {"model": "m", "input": "and?"} | wrong
                assert (await live.post(body, "/v1/responses", authorization=keys["shop"]))[0] == 400
            for item in ({"id": made["output"][0]["id"]}, {"type": "item_reference", "id": "msg_1"}):
                body = {"model": "m", "input": [item]}
                assert (await live.post(body, "/v1/responses", authorization=keys["shop"]))[0] == 400
            body = {"model": "m", "input": "hi", "conversation": "conv_1"}
            status, raw = await live.post(body, "/v1/responses", authorization=keys["shop"])
            assert (status, json.loads(raw)["error"]["param"]) == (400, "conversation")
            assert not backend.received, "nothing of it reaches the backend"
            assert (await ask(live, keys["lab"], "GET", path + "?a=%20b"))[1] == made
            listed = (await ask(live, keys["lab"], "GET", path + "/input_items"))[1]
            assert listed["data"][0]["id"] == listed["first_id"] == listed["last_id"] != "msg_0"
            assert (await ask(live, keys["lab"], "DELETE", path))[0] == 200
            paths = [
                "/v1/responses/resp_1?a=%20b",
                "/v1/responses/resp_1/input_items",
                "/v1/responses/resp_1",
            ]
            assert [request.path for request in backend.received] == paths

    asyncio.run(run())


def test_a_request_reaches_the_backend_with_its_own_ids(tmp_path: Path) -> None:
    keys, backend = make_keys(tmp_path, "lab", "shop"), Scripted(stored)

    async def run() -> None:
        async with running(tmp_path, backend) as live:
            owner = owner_of(tmp_path, "lab")
            sent = (
                b'{"model": "m", "temperature":1.0, "previous_response_id": "%b", "input": [{"id":"mine","role":"user",'
                b'"content":"\\u00e9"}, {"type":"item_reference","id":"%b"}]}'
            )
            given = sent % (owner.seal("resp_1").encode(), owner.seal("msg_1").encode())
            status, raw = await live.post(given, "/v1/responses", authorization=keys["lab"])
            assert status == 200
            assert json.loads(raw)["previous_response_id"] == owner.seal("resp_1")
            got = backend.received[-1].raw
            assert json.loads(got) == json.loads(sent % (b"resp_1", b"msg_1"))
            assert b"\\u00e9" in got
            body = {"model": "m", "input": "fail", "previous_response_id": owner.seal("resp_1")}
            status, raw = await live.post(body, "/v1/responses", authorization=keys["lab"])
            assert json.loads(raw)["error"]["message"] == f"{owner.seal('resp_1')} is gone"
            body = {"model": "m", "input": "hi", "stream": True}
            _, raw = await live.post(body, "/v1/responses", authorization=keys["lab"])
            events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith(b"data: {")]
            response_id, item_id = (owner.seal(given, owner.hint_of("b0")) for given in ("resp_1", "msg_1"))
            assert events[0]["response"]["id"] == events[2]["response"]["id"] == response_id
            assert events[1]["item_id"] == events[2]["response"]["output"][0]["id"] == item_id
            assert events[1]["delta"] == "resp_1", "a text is no id"
            _, raw = await live.post({"model": "m", "prompt": "hi"}, authorization=keys["lab"])
            assert json.loads(raw)["id"] == "resp_1", "ids that grant nothing stay as they are"

    asyncio.run(run())


def test_without_tenants_bodies_pass_as_they_are(tmp_path: Path) -> None:
    backend = Scripted(stored, card=VLLM)
    sent = b'{"model":"m",  "input":"hi","previous_response_id":"resp_0","cache_salt":"s"}'

    async def run() -> None:
        keys = make_keys(tmp_path, "lab")
        for settings in ({}, {"api_keys": ["sk-a"]}, {"key_file": str(tmp_path / "keys")}):
            async with gateway(backend, **settings) as live:
                key = keys["lab"] if "key_file" in settings else "Bearer sk-a"
                status, raw = await live.post(sent, "/v1/responses", authorization=key)
                assert (status, json.loads(raw)["id"]) == (200, "resp_1")
                assert backend.received[-1].raw == sent
                assert (await ask(live, key, "GET", "/v1/responses/resp_1"))[0] == 200

    asyncio.run(run())


def salts_of(backend: Scripted) -> list[str | None]:
    return [request.body.get("cache_salt") for request in backend.received]


def test_each_tenant_has_a_salt_that_no_client_can_choose(tmp_path: Path) -> None:
    keys = make_keys(tmp_path, "lab", "shop")
    backend = Scripted(says("hi"), card=VLLM)
    body = {"model": "m", "prompt": "hi"}

    async def run() -> None:
        async with running(tmp_path, backend, api_keys=["sk-static"]) as live:
            for key in (*keys.values(), "Bearer sk-static"):
                assert (await live.post(body, authorization=key))[0] == 200
            first = salts_of(backend)
            assert len(set(first)) == 3
            assert None not in first
            for salt in (*first, "lab", "lab\n", "", None):
                assert (await live.post(body | {"cache_salt": salt}, authorization=keys["shop"]))[0] == 200
            later = salts_of(backend)[3:]
            assert first[0] not in later
            assert later[-2:] == [first[1]] * 2, "no salt, and an empty one, are the same"
            assert len(set(later[:-2])) == 5, "a client's own salts still keep its requests apart"
            await live.post(body | {"cache_salt": 5}, authorization=keys["lab"])
            status, raw = await live.post(body | {"cache_salt": 5}, authorization=keys["lab"])
            assert (status, json.loads(raw)["error"]["param"]) == (400, "cache_salt")
        async with running(tmp_path, backend) as again:
            backend.received.clear()
            await again.post(body, authorization=keys["lab"])
            assert salts_of(backend) == first[:1], "another gateway has the same"

    asyncio.run(run())


def test_tenants_of_a_cache_group_have_one_salt(tmp_path: Path) -> None:
    keys = make_keys(tmp_path, "lab", "shop", group="pool")
    backend = Scripted(says("hi"), card=VLLM)

    async def run() -> None:
        for others in (False, True):
            if others:
                keys.update(make_keys(tmp_path, "third"))
            backend.received.clear()
            async with running(tmp_path, backend) as live:
                for key in keys.values():
                    assert (await live.post({"model": "m", "prompt": "hi"}, authorization=key))[0] == 200
            lab, shop, *third = salts_of(backend)
            assert lab == shop
            assert lab not in third
            assert (lab is not None) == others, "one group alone needs no salt"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("card", "settings", "takes"),
    [
        ({}, {}, False),
        ({"owned_by": "someone"}, {}, False),
        ({"owned_by": "vllm"}, {}, True),
        ({"owned_by": "quire"}, {"models": ["m"]}, True),
        ({}, {"takes_salt": True}, True),
        ({"owned_by": "vllm"}, {"takes_salt": False, "models": ["m"]}, False),
    ],
)
def test_a_backend_that_takes_no_salt_is_named(
    card: dict[str, str],
    settings: dict[str, Any],
    takes: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    keys, backend = make_keys(tmp_path, "lab", "shop"), Scripted(says("hi"), card=card)

    async def run() -> None:
        async with backends(backend):
            named = {"name": "c0", "url": backend.url} | settings
            config = {"backends": [named], "health": {"interval_s": 0.02}, "key_file": str(tmp_path / "keys")}
            async with gateway_of(config) as live:
                for _ in range(2):
                    status, _ = await live.post({"model": "m", "prompt": "hi"}, authorization=keys["lab"])
                    assert status == 200
                await asyncio.sleep(0.1)  # several polls

    asyncio.run(run())
    assert {salt is not None for salt in salts_of(backend)} == {takes}
    lines = [record for record in caplog.records if record.message == "tenants_share_cache"]
    assert len(lines) == (not takes), "one line"


def test_nothing_is_named_without_tenants(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_keys(tmp_path, "lab")

    async def run() -> None:
        async with running(tmp_path, Scripted(says("hi"))):
            return

    asyncio.run(run())
    assert "tenants_share_cache" not in caplog.text


@pytest.mark.parametrize("key", [{}, {"gateway_key": "k"}])
def test_routing_learns_nothing_across_tenants(tmp_path: Path, key: dict[str, str]) -> None:
    """What a backend is known to have is found by the tenant that sent it, and by its cache group."""
    keys = make_keys(tmp_path, "lab", "mate", group="pool") | make_keys(tmp_path, "shop")
    pair = [Scripted(says("hi"), card=VLLM) for _ in range(2)]

    async def run() -> None:
        async with running(tmp_path, *pair, routing={"piece_bytes": 256}, **key) as live:
            found = {}
            for tenant, salt in (("lab", ""), ("shop", ""), ("shop", "pool"), ("lab", "own"), ("mate", "")):
                body = {"model": "m", "prompt": TEXT} | ({"cache_salt": salt} if salt else {})
                status, _ = await live.post(body, authorization=keys[tenant], x_quire_explain="1")
                assert status == 200
                route = json.loads(live.headers["x-quire-route"])
                found[tenant, salt] = max(scores["prefix"] for scores in route["backends"].values())
            pieces = len(TEXT) // 256
            assert found == {
                ("lab", ""): 0,
                ("shop", ""): 0,
                ("shop", "pool"): 0,
                ("lab", "own"): 0,
                ("mate", ""): pieces,
            }

    asyncio.run(run())
