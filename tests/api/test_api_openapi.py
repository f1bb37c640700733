"""The description says what the server checks: every route, every field that is used, the forms of errors."""

from __future__ import annotations

import time
from typing import Any

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from starlette.routing import Route
from tests.api.asgi_client import Api
from tests.api.fake_frontend import FakeFrontend, say

from quire.api.openapi import BODIES as OWN_BODIES
from quire.http.field_rules import Use, field_table
from quire.jobs.routes import JobSettings, jobs_of

BODIES = {**OWN_BODIES, **jobs_of(JobSettings(), lambda: False, time.time).bodies}


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    answer = Api(FakeFrontend(lambda *_: say("ok"))).call("GET", "/openapi.json")
    assert answer.status_code == 200
    return dict(answer.json())


def test_every_route_is_described_and_nothing_else(described: dict[str, Any]) -> None:
    app = Api(FakeFrontend(lambda *_: say("ok"))).app
    own = [route for route in app.router.routes if isinstance(route, Route)]
    routes = {route.path.replace(":path}", "}") for route in own if route.include_in_schema}
    assert set(described["paths"]) == routes
    assert {route.path for route in own if not route.include_in_schema} == {
        *(f"/api/{name}" for name in ("pull", "push", "create", "copy", "delete", "blobs/{digest}")),
    }
    assert set(BODIES) <= routes
    for path, operations in described["paths"].items():
        assert all(operation["summary"] for operation in operations.values()), path


@pytest.mark.parametrize("path", sorted(BODIES))
def test_every_used_field_is_described(path: str, described: dict[str, Any]) -> None:
    schemas = described["components"]["schemas"]
    content = described["paths"][path]["post"]["requestBody"]["content"]
    name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
    properties = schemas[name]["properties"]
    for field, rule in field_table(BODIES[path].model).items():
        if rule.use is Use.MAPPED:
            assert field in properties[rule.used_as]["x-other-names"], f"{path}: {field}"
        elif rule.use is not Use.REFUSED:
            assert field in properties, f"{path}: {field}"


def test_lists_and_objects_say_what_they_hold(described: dict[str, Any]) -> None:
    """A list or an object of anything is one that no table describes."""
    open_ended = {"chat_template_kwargs", "documents", "metadata", "structures", "triggers"}
    schemas = described["components"]["schemas"]
    for model, schema in schemas.items():
        for field, given in schema.get("properties", {}).items():
            for branch in given.get("anyOf", [given]):
                bare = branch.get("items") == {} and "maxItems" not in branch
                assert not bare or field in open_ended or "Error" in model, f"{model}.{field}"


def test_description_follows_the_model() -> None:
    frontend = FakeFrontend(lambda *_: say("ok"), max_model_len=77)
    described = Api(frontend).call("GET", "/openapi.json").json()
    schemas = described["components"]["schemas"]
    assert schemas["Model"]["enum"] == ["tiny", "alias"]
    (model,) = described["paths"]["/v1/models/{model_id}"]["get"]["parameters"]
    assert model["schema"] == {"$ref": "#/components/schemas/Model"}
    assert schemas["TokenId"]["maximum"] == 256
    limits = schemas["ChatRequest"]["properties"]["max_tokens"]["anyOf"][0]
    assert (limits["minimum"], limits["maximum"]) == (1, 76)
    assert schemas["CompletionRequest"]["properties"]["suffix"]["$ref"].endswith("/Suffix")
    assert schemas["Suffix"] == {"const": ""}


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


def test_the_description_is_valid(described: dict[str, Any]) -> None:
    assert [str(error) for error in OpenAPIV31SpecValidator(described).iter_errors()] == []


WORDS = {
    "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "prompt": "hi", "input": "hi", "query": "q",
    "documents": ["d"], "text_1": "q", "text_2": "d", "tokens": [104], "inputs": "hi", "texts": ["hi"],
}  # fmt: skip


NATIVE = {"/completion", "/infill", "/generate", "/generate_stream"}
# They need an encoder, or hold objects: tests/api/test_api_tei.py.
OF_ENCODERS = {"/embed_all", "/embed_sparse", "/predict", "/classify", "/similarity"}


@pytest.mark.parametrize("path", sorted(OWN_BODIES.keys() - NATIVE - OF_ENCODERS))
def test_required_fields_are_enough_and_needed(path: str, described: dict[str, Any]) -> None:
    content = described["paths"][path]["post"]["requestBody"]["content"]
    name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
    required = described["components"]["schemas"][name].get("required", [])
    body = {field: WORDS[field] for field in required} or {"prompt": "hi", "input": "hi"}
    if path in ("/api/chat", "/api/embed", "/api/embeddings", "/api/show", "/tokenize", "/api/generate"):
        body.pop("prompt" if path in ("/api/chat", "/api/embed") else "input", None)
    body = {} if path in ("/api/chat", "/api/show") else body
    frontend = FakeFrontend(lambda *_: say("ok"))
    answer = Api(frontend).post(path, body)
    assert answer.status_code == 200, answer.text
    for field in required:
        lacking = Api(frontend).post(path, {other: value for other, value in body.items() if other != field})
        assert lacking.status_code == 400
        assert f"{field} is required" in lacking.text


@pytest.mark.parametrize("path", sorted(NATIVE - {"/infill"}))
def test_a_native_form_needs_its_text_alone(path: str, described: dict[str, Any]) -> None:
    field = "prompt" if path == "/completion" else "inputs"
    content = described["paths"][path]["post"]["requestBody"]["content"]
    name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
    assert described["components"]["schemas"][name]["required"] == [field]
    api = Api(FakeFrontend(lambda *_: say("ok")))
    assert api.post(path, {field: "hi"}).status_code == 200
    assert api.post(path, {}).status_code == 400
