"""The description says what the server checks: every route, every field that is used, the forms of errors."""

from __future__ import annotations

import time
from typing import Any

import pytest
from starlette.routing import Route
from tests.api.asgi_client import Api
from tests.api.fake_frontend import FakeFrontend, say

from quire.api.openapi import BODIES as OWN_BODIES
from quire.http.wire import Use, table_of
from quire.jobs.routes import JobSettings, jobs_of

BODIES = {**OWN_BODIES, **jobs_of(JobSettings(), lambda: False, time.time).bodies}


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    answer = Api(FakeFrontend(lambda *_: say("ok"))).call("GET", "/openapi.json")
    assert answer.status_code == 200
    return dict(answer.json())


def test_every_route_is_described_and_nothing_else(described: dict[str, Any]) -> None:
    app = Api(FakeFrontend(lambda *_: say("ok"))).app
    routes = {route.path.replace(":path}", "}") for route in app.router.routes if isinstance(route, Route)}
    assert set(described["paths"]) == routes
    assert set(BODIES) <= routes
    for path, operations in described["paths"].items():
        assert all(operation["summary"] for operation in operations.values()), path


@pytest.mark.parametrize("path", sorted(BODIES))
def test_every_used_field_is_described(path: str, described: dict[str, Any]) -> None:
    schemas = described["components"]["schemas"]
    content = described["paths"][path]["post"]["requestBody"]["content"]
    name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
    properties = schemas[name]["properties"]
    for field, rule in table_of(BODIES[path].model).items():
        if rule.use is not Use.REFUSED:
            assert field in properties, f"{path}: {field}"


def test_references_lead_somewhere(described: dict[str, Any]) -> None:
    def references(value: Any) -> set[str]:
        if isinstance(value, dict):
            own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
            return own.union(*[references(item) for item in value.values()])
        if isinstance(value, list):
            return set().union(*[references(item) for item in value])
        return set()

    known = {f"#/components/schemas/{name}" for name in described["components"]["schemas"]}
    assert references(described) <= known
    assert len(known) > 10
