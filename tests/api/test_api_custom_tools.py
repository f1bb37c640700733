"""Custom tools and namespaces of the Responses API, built-in tools, and what Codex sends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.api.asgi_client import Api, error_of
from tests.api.fake_frontend import FakeFrontend, say
from tests.api.test_api_responses import events

PATCH = "*** Begin Patch\n*** Delete File: a.py\n*** End Patch"
GRAMMAR = 'start: "*** Begin Patch" LF\n%import common.LF'
CUSTOM = {"type": "custom", "name": "apply_patch", "description": "Edit files."}
LARK = {**CUSTOM, "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR}}
REGEX = {**CUSTOM, "format": {"type": "grammar", "syntax": "regex", "definition": "[a-z]+|x"}}
FUNCTION = {"type": "function", "name": "read"}
SPACE = {"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "read"}, CUSTOM]}
CODEX = json.loads((Path(__file__).parent.parent / "clients" / "codex.json").read_text())


def written(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def api(text: str = "ok") -> Api:
    return Api(FakeFrontend(lambda *_: say(text), max_model_len=8192), tool_format="hermes")


def ask(server: Api, **fields: Any) -> httpx.Response:
    return server.post("/v1/responses", {"input": "hi", **fields})


def test_a_call_of_a_custom_tool_is_text() -> None:
    server = api(written("apply_patch", {"input": PATCH}))
    answer = ask(server, tools=[LARK])
    assert "x-quire-ignored-fields" not in answer.headers
    (item,) = answer.json()["output"]
    assert item.pop("id").startswith("ctc_")
    assert item.pop("call_id").startswith("call_")
    assert item == {
        "type": "custom_tool_call", "status": "completed", "name": "apply_patch", "input": PATCH,
    }  # fmt: skip
    (shown,) = server.frontend.rendered_tools[-1]
    assert GRAMMAR in shown["function"]["description"]
    assert shown["function"]["parameters"]["required"] == ["input"]


def test_the_events_of_a_custom_call_make_its_item() -> None:
    text = written("apply_patch", {"input": PATCH})
    whole = ask(api(text), tools=[CUSTOM]).json()["output"][0]
    found = events(ask(api(text), tools=[CUSTOM], stream=True))
    kinds = [event["type"] for event in found]
    begin = kinds.index("response.output_item.added")
    assert kinds[begin : begin + 4] == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]
    added, delta, done, ended = found[begin : begin + 4]
    assert (added["item"]["input"], delta["delta"], done["input"]) == ("", PATCH, PATCH)
    assert {**ended["item"], "id": 0, "call_id": 0} == {**whole, "id": 0, "call_id": 0}


def test_a_history_with_custom_calls_goes_to_the_template() -> None:
    server = api(written("files.apply_patch", {"input": PATCH}))
    first = ask(server, tools=[SPACE]).json()
    (item,) = first["output"]
    assert (item["namespace"], item["name"]) == ("files", "apply_patch")
    output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "Done."}
    by_id = ask(server, tools=[SPACE], input=[output], previous_response_id=first["id"])
    assert by_id.status_code == 200, by_id.text
    in_full = ask(server, tools=[SPACE], input=[{"role": "user", "content": "hi"}, item, output])
    assert in_full.status_code == 200, in_full.text
    (one, _), (other, _) = server.frontend.rendered[-2:]
    assert one == other
    _, call, result = one
    assert call["tool_calls"][0]["function"] == {"name": "files.apply_patch", "arguments": {"input": PATCH}}
    assert (result["name"], result["content"]) == ("files.apply_patch", "Done.")


def test_a_required_custom_call_keeps_to_its_regex() -> None:
    server = api(written("apply_patch", {"input": "abc"}))
    response = ask(server, tools=[REGEX], tool_choice={"type": "custom", "name": "apply_patch"})
    assert response.status_code == 200, response.text
    assert "x-quire-ignored-fields" not in response.headers
    form = server.frontend.submitted[-1].sampling.structured_outputs
    assert form is not None
    assert "^(?:[a-z]+|x)$" in str(form.structural_tag)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_custom_call_keeps_to_its_lark_grammar(choice: str) -> None:
    server = api(written("apply_patch", {"input": PATCH}))
    response = ask(server, tools=[LARK, FUNCTION], tool_choice=choice)
    assert response.status_code == 200, response.text
    form = server.frontend.submitted[-1].sampling.structured_outputs
    assert form is not None
    assert GRAMMAR in str(form.structural_tag).encode().decode("unicode_escape")
    kinds = {"auto": "triggered_tags", "required": "tags_with_separator"}
    assert dict(form.structural_tag)["format"]["type"] == kinds[choice]
    shown = server.frontend.rendered_tools[-1][0]["function"]
    assert "x-lark" not in str(shown["parameters"])


def test_tools_without_a_grammar_leave_the_answer_free() -> None:
    server = api()
    assert ask(server, tools=[CUSTOM, FUNCTION]).status_code == 200
    assert server.frontend.submitted[-1].sampling.structured_outputs is None


@pytest.mark.parametrize("kind", ["web_search", "file_search", "code_interpreter", "image_generation", "mcp"])
def test_built_in_tools_are_refused_with_a_cause(kind: str) -> None:
    error = error_of(ask(api(), tools=[{"type": kind}]), 400)
    assert error["param"] == "tools[0].type"
    assert "runs on OpenAI's servers" in error["message"]


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "magic"}, "tools[0].type"),
        ({**CUSTOM, "format": {"type": "grammar", "syntax": "lark"}}, "tools[0].format.definition"),
        ({**CUSTOM, "format": {"type": "xml"}}, "tools[0].format.type"),
        ({**SPACE, "tools": [SPACE]}, "tools[0].tools[0].type"),
    ],
)
def test_wrong_tools_are_refused_by_name(tool: dict[str, Any], param: str) -> None:
    assert error_of(ask(api(), tools=[tool]), 400)["param"] == param


def test_what_codex_sends_is_answered() -> None:
    server = api(written("apply_patch", {"input": PATCH}))
    response = server.post("/v1/responses", CODEX)
    assert response.status_code == 200, response.text
    assert set(response.headers["x-quire-ignored-fields"].split(", ")) == {
        "prompt_cache_key", "client_metadata", "tools[].web_search", "text.verbosity",
        "reasoning.summary",
    }  # fmt: skip
    done = [e["item"] for e in events(response) if e["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == ["custom_tool_call"]
