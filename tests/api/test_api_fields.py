"""Every property of OpenAI's create-requests is classified, and each class does what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.api.asgi_client import Api, error_of

import quire.api.app  # noqa: F401 - every wire model is there then
from quire.api.dialects.openai.fields import ChatRequest, CompletionRequest
from quire.api.dialects.openai.pooling import EmbeddingRequest
from quire.api.fields import StreamOptions
from quire.api.history import Message
from quire.http.field_rules import Table, Use, field_table, sections
from quire.http.wire import Wire

ENDPOINTS = [
    ("CreateChatCompletionRequest", field_table(ChatRequest), "chat"),
    ("CreateCompletionRequest", field_table(CompletionRequest), "completions"),
    ("CreateEmbeddingRequest", field_table(EmbeddingRequest), "embeddings"),
]


# Names of OpenAI's openapi.yaml 2.3.0 (MIT license), through $ref and allOf.
_PROPERTIES = json.loads(Path(__file__).with_name("openai_properties.json").read_text())


def properties(name: str) -> set[str]:
    """The names of all properties of OpenAI's schema ``name``."""
    return set(_PROPERTIES[name].split())


@pytest.mark.parametrize(("schema", "table", "_name"), ENDPOINTS)
def test_every_property_of_openai_is_classified(schema: str, table: Table, _name: str) -> None:
    names = properties(schema)
    assert len(names) >= 5
    assert names <= set(table), f"unclassified: {sorted(names - set(table))}"


def test_message_and_stream_option_properties_are_classified() -> None:
    for role in ("System", "Developer", "User", "Assistant", "Tool"):
        names = properties(f"ChatCompletionRequest{role}Message")
        assert names <= set(field_table(Message)), sorted(names - set(field_table(Message)))
    assert properties("ChatCompletionStreamOptions") <= set(field_table(StreamOptions))


def test_a_section_has_only_names_that_its_model_does_not_use() -> None:
    def derived(model: type[Wire]) -> set[type[Wire]]:
        return {model}.union(*[derived(child) for child in model.__subclasses__()])

    models = {model.__name__: model for model in derived(Wire)}
    for section, said in sections().items():
        assert said.keys() <= {"no_effect", "mapped", "refused"}, section
        assert all(rule.keys() <= {"neutral", "hint"} for rule in said.get("refused", {}).values()), section
        if section != "tools":
            names = {*said.get("no_effect", ()), *said.get("refused", {}), *said.get("mapped", {})}
            assert names.isdisjoint(models[section].model_fields), section
            assert names <= set(field_table(models[section])), section


def ask(api: Api, endpoint: str, fields: dict[str, Any]) -> Any:
    if endpoint == "embeddings":
        return api.post("/v1/embeddings", {"input": "a", **fields})
    return api.chat(**fields) if endpoint == "chat" else api.complete(**fields)


@pytest.mark.parametrize(("_schema", "table", "endpoint"), ENDPOINTS)
def test_refused_fields_are_named_and_neutral_values_pass(_schema: str, table: Table, endpoint: str) -> None:
    api = Api()
    for name, rule in table.items():
        if rule.use in (Use.USED, Use.MAPPED):
            continue
        assert ask(api, endpoint, {name: None}).status_code == 200, name
        for value in rule.neutral:
            assert ask(api, endpoint, {name: value}).status_code == 200, (name, value)
        odd = {"something": ["unheard", "of"]}
        if rule.use is Use.NO_EFFECT:
            assert ask(api, endpoint, {name: odd}).status_code == 200, name
            continue
        error = error_of(ask(api, endpoint, {name: odd}), 400)
        assert error["param"] == name
        assert error["code"] == "unsupported_parameter"
        assert name in error["message"]


def test_a_neutral_value_is_of_its_own_type() -> None:
    """1 == True in Python; to a client they differ."""
    error_of(Api().complete(echo=0), 400)
    error_of(Api().complete(use_beam_search=0), 400)
    assert Api().complete(length_penalty=1).status_code == 200  # 1 and 1.0 are one number


def test_best_of_that_is_n_asks_for_nothing() -> None:
    api = Api()
    assert api.complete(n=2, best_of=2).status_code == 200
    assert api.complete(best_of=1, stream=True).status_code == 200
    assert [s.sampling.best_of for s in api.frontend.submitted] == [None, None]


def test_unknown_fields_are_refused_with_the_nearest_name() -> None:
    error = error_of(Api().chat(temprature=0.5), 400)
    assert error["param"] == "temprature"
    assert error["code"] == "unknown_parameter"
    assert "'temperature'" in error["message"]
    error = error_of(Api(strict_fields=True).chat(messages=[{"role": "user", "contents": "hi"}]), 400)
    assert error["param"] == "messages[0].contents"
    assert error["message"].startswith("Unknown field 'messages[0].contents' (did you mean 'content'?)")
    error = error_of(Api().chat(stream=True, stream_options={"include_usag": True}), 400)
    assert error["param"] == "stream_options.include_usag"


@pytest.mark.parametrize("stream", [False, True])
def test_lenient_accepts_unknown_fields_alone_and_lists_them(stream: bool) -> None:
    api = Api(lenient=True)
    messages = [{"role": "user", "content": "hi", "mood": "good"}]
    response = api.chat(temprature=0.5, zzz=1, messages=messages, stream=stream)
    assert response.status_code == 200
    assert response.headers["x-quire-ignored-fields"] == "temprature, zzz, messages[].mood"
    assert "x-quire-ignored-fields" not in api.chat().headers
    assert error_of(api.complete(suffix="x"), 400)["param"] == "suffix"  # known and refused stays refused
    assert error_of(api.chat(temperature="hot"), 400)["param"] == "temperature"
