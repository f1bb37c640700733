"""With a key file each tenant has its own cache, files, batches and responses."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from tests.api.asgi_client import Api, error_of

from quire.api.dialects.responses.stored import pending_response
from quire.api.generation import Generation
from quire.api.job import Job
from quire.http.call import Call, cache_salt
from quire.http.keys import ApiKey, KeyFile, create_key
from quire.metrics.engine_stats import EngineStats
from quire.request import SamplingParams

Ask = Callable[..., httpx.Response]


@pytest.fixture
def tenants(tmp_path: Path) -> tuple[Api, Ask, Ask, Ask]:
    """An app, and calls of it as two keys of one tenant and as another tenant."""
    path = tmp_path / "keys"
    made = [
        create_key(path, ApiKey(name, tenant, "", created=datetime.now(UTC)))
        for name, tenant in (("ann", "lab"), ("ben", "lab"), ("eve", "shop"))
    ]
    api = Api(key_file=KeyFile(path, lambda: 0.0), batch_dir=str(tmp_path / "batches"))

    def caller(key: str) -> Ask:
        def call(method: str, path: str, **kwargs: Any) -> httpx.Response:
            return api.call(method, path, headers={"authorization": f"Bearer {key}"}, **kwargs)

        return call

    ann, ben, eve = map(caller, made)
    return api, ann, ben, eve


def test_without_a_key_only_probes_answer(tenants: tuple[Api, Ask, Ask, Ask]) -> None:
    api = tenants[0]
    assert api.call("GET", "/livez").status_code == 200
    assert error_of(api.call("GET", "/v1/models"), 401)["code"] == "invalid_api_key"


def test_tenants_share_no_cached_blocks(tenants: tuple[Api, Ask, Ask, Ask]) -> None:
    api, *callers = tenants
    body = {"model": "tiny", "prompt": "hi", "cache_salt": "s", "user": "u"}
    for call in callers:
        assert call("POST", "/v1/completions", json=body).status_code == 200
    salts = [each.kwargs["cache_salt"] for each in api.frontend.submitted]
    assert salts[0] == salts[1] != salts[2]
    assert [each.kwargs["tenant"] for each in api.frontend.submitted] == ["lab", "lab", "shop"]


def test_no_client_can_choose_the_salt_of_another_tenant() -> None:
    """Of any two callers, with any salts, the effective ones are equal only where group and salt are."""
    given = ["", "s", "lab", "lab\n", "\nlab\n", "+pool\ns", "lab\ns", "\n"]
    pairs = [(group, salt) for group in ("", "lab", "shop", "+pool") for salt in given]
    made = {pair: cache_salt(*pair) for pair in pairs}
    assert len(set(made.values())) == len(pairs)
    assert made["", "s"] == "s"
    assert made["", ""] == ""


def test_a_salt_reads_no_other_tenants_blocks(tenants: tuple[Api, Ask, Ask, Ask]) -> None:
    api, ann, _, eve = tenants
    assert ann("POST", "/v1/completions", json={"model": "tiny", "prompt": "hi"}).status_code == 200
    for salt in ("lab", "lab\n", "\n"):
        body = {"model": "tiny", "prompt": "hi", "cache_salt": salt}
        assert eve("POST", "/v1/completions", json=body).status_code == 200
    salts = [each.kwargs["cache_salt"] for each in api.frontend.submitted]
    assert salts[0] not in salts[1:]


def test_tenants_of_a_cache_group_share_blocks_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    keys = [
        create_key(path, ApiKey(name, name, "", created=datetime.now(UTC), cache_group=group))
        for name, group in (("ann", "pool"), ("ben", "pool"), ("pool", ""))
    ]
    api = Api(key_file=KeyFile(path, lambda: 0.0))
    made = ""
    for key in keys:
        headers, body = {"authorization": f"Bearer {key}"}, {"model": "tiny", "input": "hi"}
        answer = api.call("POST", "/v1/responses", json=body, headers=headers)
        made = made or answer.json()["id"]
        status = api.call("GET", f"/v1/responses/{made}", headers=headers).status_code
        assert status == (200 if key == keys[0] else 404)
    salts = [each.kwargs["cache_salt"] for each in api.frontend.submitted]
    assert salts[0] == salts[1] != salts[2]


def test_a_running_response_is_not_for_keys_without_a_tenant() -> None:
    """A key of ``--api-key`` has no tenant: that is not a right to read what runs for others."""
    api = Api()
    running = object.__new__(Generation)
    running.job = Job((), SamplingParams(), cast(Any, None), owner="lab", in_background=True)
    state = api.app.state.quire
    for tenant, sees in (("lab", True), ("", False), ("shop", False)):
        state.running["resp_1"] = frozenset(("resp_1",)), running
        assert (pending_response(state, Call(tenant=tenant), "resp_1") is running) == sees


def test_a_key_sees_what_runs_for_its_tenant_alone(tmp_path: Path) -> None:
    """`/slots` and ``/engine/live`` have ids and sizes of requests; an operator's key sees those of all."""
    path, now = tmp_path / "keys", datetime.now(UTC)
    keys = {
        name: create_key(path, ApiKey(name, name, "", created=now, admin=name == "root"))
        for name in ("lab", "shop", "root")
    } | {"static": "sk-static"}
    api = Api(key_file=KeyFile(path, lambda: 0.0), api_keys=("sk-static",))
    api.frontend.state = "failed"  # the live feed ends at once
    running = object.__new__(Generation)
    running.job = Job((), SamplingParams(), cast(Any, None), owner="lab")
    running.describe = lambda now_s: {"id": "chatcmpl-1"}  # type: ignore[method-assign]
    seen, live = {}, {}
    api.app.state.quire.running["chatcmpl-1"] = frozenset(("chatcmpl-1",)), running
    for name, key in keys.items():
        headers = {"authorization": f"Bearer {key}"}
        seen[name] = api.call("GET", "/slots", headers=headers).json()[0]["is_processing"]
        live[name] = api.call("GET", "/engine/live", headers=headers).status_code
    assert seen == {"lab": True, "shop": False, "root": True, "static": True}
    assert live == {"lab": 403, "shop": 403, "root": 200, "static": 200}


def test_a_response_belongs_to_its_tenant(tenants: tuple[Api, Ask, Ask, Ask]) -> None:
    _, ann, ben, eve = tenants
    made = ann("POST", "/v1/responses", json={"model": "tiny", "input": "hi"}).json()["id"]
    assert ben("GET", f"/v1/responses/{made}").status_code == 200
    assert eve("GET", f"/v1/responses/{made}").status_code == 404
    assert eve("DELETE", f"/v1/responses/{made}").status_code == 404
    follow = {"model": "tiny", "input": "and?", "previous_response_id": made}
    assert error_of(eve("POST", "/v1/responses", json=follow), 400)["code"] == "previous_response_not_found"
    assert ben("POST", "/v1/responses", json=follow).status_code == 200


def test_files_and_batches_belong_to_their_tenant(tenants: tuple[Api, Ask, Ask, Ask]) -> None:
    _, ann, ben, eve = tenants
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi"}}
    form = {
        "data": {"purpose": "batch"},
        "files": {"file": ("lines.jsonl", json.dumps(line).encode() + b"\n")},
    }
    file = ann("POST", "/v1/files", **form).json()
    assert "tenant" not in file
    assert [each["id"] for each in ben("GET", "/v1/files").json()["data"]] == [file["id"]]
    assert eve("GET", "/v1/files").json()["data"] == []
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        assert eve(method, f"/v1/files/{file['id']}{path}").status_code == 404
    begin = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    assert error_of(eve("POST", "/v1/batches", json=begin), 400)["param"] == "input_file_id"
    batch = ann("POST", "/v1/batches", json=begin).json()
    assert "tenant" not in batch
    assert ben("GET", f"/v1/batches/{batch['id']}").status_code == 200
    assert eve("GET", f"/v1/batches/{batch['id']}").status_code == 404
    assert eve("POST", f"/v1/batches/{batch['id']}/cancel").status_code == 404
    assert eve("GET", "/v1/batches").json()["data"] == []


def test_weights_of_the_key_file_reach_the_request(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    key = create_key(path, ApiKey("ann", "lab", "", created=datetime.now(UTC), weight=2.5))
    api = Api(key_file=KeyFile(path, lambda: 0.0))
    for route, body in (
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}),
    ):
        body |= {"model": "tiny", "user": "u"} if "prompt" in body else {"model": "tiny"}
        headers = {"authorization": f"Bearer {key}"}
        assert api.call("POST", route, json=body, headers=headers).status_code == 200
    assert [each.kwargs["tenant"] for each in api.frontend.submitted] == ["lab", "lab"]
    assert [each.kwargs["tenant_weight"] for each in api.frontend.submitted] == [2.5, 2.5]


@pytest.mark.parametrize(
    ("order", "listed"),
    [
        ("fcfs", {"priority", "user"}),
        ("priority", {"user"}),
        ("fair", {"priority"}),
        ("deadline", {"priority", "user"}),
        ("", set()),
    ],
)
def test_what_the_order_does_not_read_is_listed(order: str, listed: set[str], monkeypatch: Any) -> None:
    api = Api()
    monkeypatch.setattr(api.frontend, "stats", lambda: EngineStats(order=order))
    response = api.chat(priority=3, user="anna")
    assert set(filter(None, response.headers.get("x-quire-ignored-fields", "").split(", "))) == listed
    assert "x-quire-ignored-fields" not in api.chat().headers
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], "metadata": {"user_id": "anna"}}
    header = api.post("/v1/messages", body).headers.get("x-quire-ignored-fields")
    assert header == ("metadata.user_id" if "user" in listed else None)


def test_a_servers_metrics_name_no_tenant(tmp_path: Path) -> None:
    text = create_key(
        tmp_path / "keys", ApiKey(name="bob", tenant="secret-lab", digest="", created=datetime.now(UTC))
    )
    api = Api(key_file=KeyFile(tmp_path / "keys", lambda: 0.0))
    body = {"model": "tiny", "prompt": "hi"}
    for key, status in ((text, 200), ("wrong", 401)):
        answer = api.post("/v1/completions", body, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == status
    assert "secret-lab" not in api.call("GET", "/metrics").text
