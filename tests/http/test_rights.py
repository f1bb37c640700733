"""For whom a request runs: its own key, the paths that need none, and what a gateway says of it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from quire.http.account import Account
from quire.http.call import Call
from quire.http.keys import ApiKey, KeyFile, create_key
from quire.http.refusals import HttpError
from quire.http.rights import Rights, holds_key

PAST, FUTURE = datetime(2020, 1, 1, tzinfo=UTC), datetime(2999, 1, 1, tzinfo=UTC)


def scope(path: str = "/v1/models", **headers: str) -> dict[str, Any]:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "path": path, "headers": pairs}


def refused(rights: Rights, asked: dict[str, Any]) -> tuple[int, str]:
    with pytest.raises(HttpError) as raised:
        rights.of(Call(), asked)
    return raised.value.refusal.status, raised.value.refusal.message


def test_only_open_paths_need_no_key() -> None:
    rights = Rights(["sk-1", "sk-2"], None, None)
    for path in ("/", "/docs", "/readyz", "/metrics"):
        assert rights.of(Call(), scope(path)) == Call()
    for headers in ({}, {"authorization": "Bearer sk-3"}, {"authorization": "Basic sk-1"}, {"x_api_key": ""}):
        assert refused(rights, scope(**headers))[0] == 401
    for headers in ({"authorization": "bearer  sk-2"}, {"x_api_key": "sk-1"}):
        assert rights.of(Call(), scope(**headers)) == Call()


def test_a_server_without_keys_asks_for_none() -> None:
    assert Rights([], None, None).of(Call(), scope()) == Call()
    assert not holds_key(scope(authorization="Bearer "), None)


def test_a_key_of_the_file_brings_tenant_share_and_paths(tmp_path: Path) -> None:
    path = tmp_path / "keys"

    def make(name: str, **values: Any) -> str:
        return create_key(path, ApiKey(name=name, tenant="lab", digest="", created=PAST, **values))

    ours = make("ours", weight=3.0, expires=FUTURE, endpoints=("/v1/*",), cache_group="all")
    old = make("old", expires=PAST)
    rights = Rights([], KeyFile(path, lambda: 0.0), None)
    call = rights.of(Call("id"), scope(authorization=f"Bearer {ours}"))
    assert (call.request_id, call.tenant, call.weight, call.cache_group) == ("id", "lab", 3.0, "+all")
    assert call.key is not None
    assert call.key.name == "ours"
    assert refused(rights, scope("/slots", x_api_key=ours)) == (
        403,
        "The API key 'ours' may not call /slots; it may call /v1/*.",
    )
    assert refused(rights, scope(x_api_key=old)) == (401, "The API key 'old' has expired.")


def test_only_a_gateway_with_the_key_says_for_whom_it_runs() -> None:
    rights = Rights([], None, "between-us")
    said = {name.replace("-", "_"): value for name, value in Account("r1", "lab", "ours", 2.0).headers()}
    call = rights.of(Call(), scope(x_quire_gateway_key="between-us", **said))
    assert (call.tenant, call.weight) == ("lab", 2.0)
    assert call.account is not None
    assert call.account.request_id == "r1"
    for key in ({}, {"x_quire_gateway_key": "between-u"}):
        assert rights.of(Call(), scope(**key, **said)) == Call()
    second = rights.of(Call(), scope(x_quire_gateway_key="between-us", x_quire_second="1", **said))
    assert (second.tenant, second.account) == ("lab", None), "what a second attempt uses is not noted"
