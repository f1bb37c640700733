"""With a key file each tenant has its own cache, files, batches and responses."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.api.asgi_client import Api, error_of

from quire.http.keys import ApiKey, KeyFile, create_key
from quire.metrics.engine_stats import EngineStats

Call = Callable[..., httpx.Response]


@pytest.fixture
def tenants(tmp_path: Path) -> tuple[Api, Call, Call, Call]:
    """An app, and calls of it as two keys of one tenant and as another tenant."""
    path = tmp_path / "keys"
    made = [
        create_key(path, ApiKey(name, tenant, "", created=datetime.now(UTC)))
        for name, tenant in (("ann", "lab"), ("ben", "lab"), ("eve", "shop"))
    ]
    api = Api(key_file=KeyFile(path, lambda: 0.0), batch_dir=str(tmp_path / "batches"))

    def caller(key: str) -> Call:
        def call(method: str, path: str, **kwargs: Any) -> httpx.Response:
            return api.call(method, path, headers={"authorization": f"Bearer {key}"}, **kwargs)

        return call

    ann, ben, eve = map(caller, made)
    return api, ann, ben, eve


def test_without_a_key_only_probes_answer(tenants: tuple[Api, Call, Call, Call]) -> None:
    api = tenants[0]
    assert api.call("GET", "/livez").status_code == 200
    assert error_of(api.call("GET", "/v1/models"), 401)["code"] == "invalid_api_key"


def test_tenants_share_no_cached_blocks(tenants: tuple[Api, Call, Call, Call]) -> None:
    api, *callers = tenants
    body = {"model": "tiny", "prompt": "hi", "cache_salt": "s", "user": "u"}
    for call in callers:
        assert call("POST", "/v1/completions", json=body).status_code == 200
    salts = [each.kwargs["cache_salt"] for each in api.frontend.submitted]
    assert salts[0] == salts[1] != salts[2]
    assert [each.kwargs["tenant"] for each in api.frontend.submitted] == ["lab", "lab", "shop"]


def test_a_response_belongs_to_its_tenant(tenants: tuple[Api, Call, Call, Call]) -> None:
    _, ann, ben, eve = tenants
    made = ann("POST", "/v1/responses", json={"model": "tiny", "input": "hi"}).json()["id"]
    assert ben("GET", f"/v1/responses/{made}").status_code == 200
    assert eve("GET", f"/v1/responses/{made}").status_code == 404
    assert eve("DELETE", f"/v1/responses/{made}").status_code == 404
    follow = {"model": "tiny", "input": "and?", "previous_response_id": made}
    assert error_of(eve("POST", "/v1/responses", json=follow), 400)["code"] == "previous_response_not_found"
    assert ben("POST", "/v1/responses", json=follow).status_code == 200


def test_files_and_batches_belong_to_their_tenant(tenants: tuple[Api, Call, Call, Call]) -> None:
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
