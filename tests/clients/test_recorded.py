"""What real clients sent (`tests.clients.run --record`) is answered in their dialect, with its calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.api.asgi_client import Api
from tests.clients.run import CLIENTS
from tests.clients.scripted import frontend

from quire.text.grammar import grammar_source

HERE = Path(__file__).parent
RECORDED = {file.stem: json.loads(file.read_text()) for file in sorted((HERE / "recorded").glob("*.json"))}
WEATHER = [("get_weather", {"city": "Zürich"})]
# What ends a stream, by path.
ENDS = {
    "/v1/chat/completions": "data: [DONE]",
    "/v1/completions": "data: [DONE]",
    "/v1/messages": 'event: message_stop\ndata: {"type":"message_stop"}',
    "/v1/responses": "event: response.completed",
    "/api/chat": '"done":true',
    "/api/generate": '"done":true',
}


# Whether they are read depends on the order of the scheduler and on the model.
DEPENDENT = {"user", "metadata.user_id", "priority", "reasoning_effort", "reasoning.effort", ""}


def listed(header: str) -> set[str]:
    return set(header.split(", ")) - DEPENDENT


def streams(path: str, body: dict[str, Any]) -> bool:
    return path in ENDS and bool(body.get("stream", path.startswith("/api/")))


def lines(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        data = line.removeprefix("data: ")
        if data.startswith("{"):
            yield json.loads(data)


def calls_of(path: str, response: httpx.Response, streamed: bool) -> list[tuple[str, Any]]:
    """The calls of an answer, put together as a client of the dialect does."""
    found: list[list[str]] = []  # name, arguments as text
    for part in lines(response.text) if streamed else [response.json()]:
        if path == "/v1/chat/completions":
            for choice in part["choices"]:
                said = choice["delta"] if streamed else choice["message"]
                for call in said.get("tool_calls") or ():
                    if call.get("index", len(found)) == len(found):
                        found.append([call["function"]["name"], ""])
                    found[-1][1] += call["function"]["arguments"]
        elif path == "/v1/messages":
            for block in part.get("content", ()):
                if block["type"] == "tool_use":
                    found.append([block["name"], json.dumps(block["input"])])
            if part.get("content_block", {}).get("type") == "tool_use":
                found.append([part["content_block"]["name"], ""])
            found[-1:] = [
                [name, said + part.get("delta", {}).get("partial_json", "")] for name, said in found[-1:]
            ]
        elif path == "/v1/responses":
            whole = part.get("response", {}) if part.get("type") == "response.completed" else part
            found += [
                [item["name"], item["arguments"]]
                for item in whole.get("output", ())
                if item["type"] == "function_call"
            ]
        elif path == "/api/chat":
            for call in part["message"].get("tool_calls", ()):
                found.append([call["function"]["name"], json.dumps(call["function"]["arguments"])])
    return [(name, json.loads(arguments)) for name, arguments in found]


def asks_for_weather(body: dict[str, Any]) -> bool:
    """Whether the scripted model, given this body, calls its tool."""
    turns = body.get("messages") or body.get("input") or [{}]
    last = turns[-1] if isinstance(turns, list) else {"role": "user", "content": turns}
    asked = (
        last.get("role") == "user" and "weather" in json.dumps(last) and "tool_result" not in json.dumps(last)
    )
    choice = body.get("tool_choice")
    return asked and bool(body.get("tools")) and choice not in ("none", {"type": "none"})


@pytest.fixture(scope="module")
def api() -> Api:
    return Api(frontend(), tool_format="hermes")


@pytest.mark.parametrize("client", RECORDED)
def test_recorded_bodies_are_answered_in_their_dialect(client: str, api: Api) -> None:
    assert len(RECORDED[client]) >= 2
    for number, entry in enumerate(RECORDED[client]):
        path, body = entry["path"], entry["body"]
        response = api.post(path, body)
        said = f"{client}, {number}: {response.text[:500]}"
        assert response.status_code == entry["status"], said
        assert listed(response.headers.get("x-quire-ignored-fields", "")) == listed(entry["ignored"]), said
        if response.status_code != 200:
            continue
        streamed = streams(path, body)
        if streamed:
            assert ENDS[path] in response.text, said
        else:
            assert response.headers["content-type"] == "application/json", said
        if path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"):
            assert calls_of(path, response, streamed) == (WEATHER if asks_for_weather(body) else []), said


def test_continued_threads_are_refused_as_the_client_expects() -> None:
    """Anthropic's tool runner then sends the whole history."""
    api = Api(frontend())
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    assert (
        api.post("/v1/messages", {**body, "thread": {"type": "create"}}).headers["x-quire-ignored-fields"]
        == "thread"
    )
    thread = {"type": "continue", "previous_message_id": "msg_1"}
    response = api.post("/v1/messages", {**body, "thread": thread})
    assert response.status_code == 404
    assert response.json()["error"]["details"] == {"error_code": "thread_not_found"}


def test_references_stand_for_stored_items() -> None:
    """The AI SDK sends those for its earlier turns."""
    api = Api(frontend(), tool_format="hermes")
    tool = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
    asked = {"model": "quill", "tools": [tool]}
    turn = {"role": "user", "content": "How is the weather?"}
    first = api.post("/v1/responses", {**asked, "input": [turn]}).json()["output"]
    call = first[-1]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "12 °C in Zürich"}
    whole = api.post("/v1/responses", {**asked, "input": [turn, *first, result]})
    references = [{"type": "item_reference", "id": item["id"]} for item in first]
    again = api.post("/v1/responses", {**asked, "input": [turn, *references, result]})
    assert [item["type"] for item in first] == ["reasoning", "function_call"]
    assert again.json()["output"][-1]["content"] == whole.json()["output"][-1]["content"]
    assert again.json()["usage"] == whole.json()["usage"]
    refused = api.post("/v1/responses", {**asked, "input": [{"type": "item_reference", "id": "rs_1"}]})
    assert refused.json()["error"]["param"] == "input[0]"


def test_a_named_tool_is_called_once() -> None:
    api = Api(frontend(), tool_format="hermes")
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
    for choice, plural in (
        ({"type": "function", "function": {"name": "get_weather"}}, False),
        ("required", True),
    ):
        assert api.chat(model="quill", tools=[tool], tool_choice=choice).status_code == 200
        form = api.frontend.submitted[-1].sampling.structured_outputs
        assert ("at_least_one" in str(form)) == plural, form


def test_schemas_are_closed_with_and_without_strict() -> None:
    api = Api(frontend())
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for strict in (True, False, None):
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": strict}}
        assert api.chat(model="quill", response_format=form).status_code == 200
        outputs = api.frontend.submitted[-1].sampling.structured_outputs
        assert outputs is not None
        assert json.loads(grammar_source(outputs))["closed"] is True
    letter = {"json": schema, "disable_additional_properties": False}
    assert api.chat(model="quill", structured_outputs=letter).status_code == 200
    outputs = api.frontend.submitted[-1].sampling.structured_outputs
    assert json.loads(grammar_source(outputs))["closed"] is False


def test_every_client_has_bodies_or_a_reason() -> None:
    without = {name for name, client in CLIENTS.items() if "unrecorded" in client}
    assert set(RECORDED) == set(CLIENTS) - without


def test_agents_that_went_round_are_among_the_bodies() -> None:
    """Each dialect has a recorded turn with a call, its result, and text after it."""
    paths = {
        entry["path"]
        for entries in RECORDED.values()
        for entry in entries
        if entry["status"] == 200 and ("12 °C" in json.dumps(entry["body"], ensure_ascii=False))
    }
    assert {"/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"} <= paths


def test_the_page_of_clients_names_their_versions() -> None:
    page = (HERE.parents[1] / "docs" / "connect.md").read_text()
    for name, client in CLIENTS.items():
        version = re.split("==|@", client["packages"][0])[-1]
        assert f"| `{name}` | {version} |" in page, name
