"""OpenAI's Responses API: items, events, what the template sees, the store, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from tests.api.asgi_client import Api, error_of
from tests.api.fake_frontend import FakeFrontend, say
from tests.api.test_api_fields import properties

from quire.api.dialects.responses import request as protocol
from quire.api.dialects.responses.store import ResponseStore, Stored
from quire.api.dialects.responses.tools import CustomTool, FunctionTool
from quire.api.history import TextPart
from quire.http.field_rules import Use, field_table

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "name": "get", "parameters": SCHEMA}, {"type": "function", "name": "now"}]
CALLS = (
    '<think>Hm.</think>Sure.\n<tool_call>\n{"name": "get", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
)


def api(text: str = "Hello 🙂", **settings: Any) -> Api:
    frontend = FakeFrontend(lambda prompt, index, seed: say(text), max_model_len=1024)
    return Api(frontend, tool_format="hermes", **settings)


def ask(server: Api, **fields: Any) -> httpx.Response:
    return server.post("/v1/responses", {"input": "hi", **fields})


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    found = []
    for i, block in enumerate(response.text.removesuffix("\n\n").split("\n\n")):
        event, data = block.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert event == f"event: {value['type']}"
        assert value["sequence_number"] == i
        found.append(value)
    return found


def assembled(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The last event's response, after checking that the events before it say the same."""
    assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
    assert found[0]["response"]["status"] == "in_progress"
    items: list[dict[str, Any]] = []
    for event in found[2:-1]:
        kind = event["type"].removeprefix("response.")
        place = event.get("output_index")
        if kind == "output_item.added":
            assert place == len(items)
            items.append(event["item"])
            assert items[-1]["status"] == "in_progress"
            text = ""
        elif kind == "content_part.added":
            assert event["part"]["text"] == ""
        elif kind.endswith(".delta"):
            assert event["item_id"] == items[-1]["id"]
            text += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == text
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == text
        elif kind == "content_part.done":
            assert event["part"]["text"] == text
        else:
            assert kind == "output_item.done"
            assert event["item"]["id"] == items[place]["id"]
            items[place] = event["item"]
    response = dict(found[-1]["response"])
    assert found[-1]["type"] == f"response.{response['status']}"
    assert items == response["output"]
    return response


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    assert response["id"].startswith("resp_")
    items = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]
    kept = {k: v for k, v in response.items() if k not in ("id", "created_at", "completed_at")}
    return {**kept, "output": items}


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("Hello 🙂", {}),
        ("Hello 🙂", {"max_output_tokens": 3, "metadata": {"a": "b"}, "temperature": 0.2}),
        ("", {}),
        (CALLS, {"tools": TOOLS}),
        (CALLS, {"tools": TOOLS, "parallel_tool_calls": False}),
        (CALLS, {"tools": TOOLS, "max_output_tokens": 70}),
        (CALLS, {"tools": TOOLS, "max_output_tokens": 10}),
        (CALLS, {"instructions": "Be brief.", "reasoning": {"effort": "low", "summary": "auto"}}),
    ],
)
def test_stream_equals_whole(text: str, fields: dict[str, Any]) -> None:
    whole = ask(api(text), **fields).json()
    streamed = assembled(events(ask(api(text), stream=True, **fields)))
    assert without_ids(streamed) == without_ids(whole)


def test_a_response() -> None:
    response = ask(api(CALLS), tools=TOOLS).json()
    assert (response["object"], response["status"], response["model"]) == ("response", "completed", "tiny")
    reasoning, message, get, now = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"] == [{"type": "output_text", "text": "Sure.", "annotations": [], "logprobs": []}]
    assert (get["type"], get["name"], get["arguments"]) == ("function_call", "get", '{"city": "Zürich"}')
    assert get["call_id"] != now["call_id"]
    assert response["usage"] == {
        "input_tokens": len("<user>hi"),
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": len(say(CALLS)),
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": len("<user>hi") + len(say(CALLS)),
    }
    cut = ask(api(CALLS), tools=TOOLS, max_output_tokens=70).json()
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in cut["output"]] == ["completed", "completed", "incomplete"]


def test_the_template_sees_the_conversation() -> None:
    server = api(CALLS)
    first = ask(server, instructions="Old.", tools=TOOLS).json()
    call_id = first["output"][2]["call_id"]
    given = [
        {
            "type": "function_call_output",
            "call_id": call_id,
            "output": [{"type": "input_text", "text": "rain"}],
        },
        {"role": "developer", "content": [{"type": "input_text", "text": text} for text in ("Be", "kind.")]},
    ]
    fields = {"instructions": "New.", "tools": TOOLS, "reasoning": {"effort": "max"}, "tool_choice": "none"}
    expected = [
        {"role": "system", "content": "New."},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "Sure.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                    "id": item["call_id"],
                }
                for name, arguments, item in (
                    ("get", {"city": "Zürich"}, first["output"][2]),
                    ("now", {}, first["output"][3]),
                )
            ],
        },
        {"role": "tool", "content": "rain", "name": "get", "tool_call_id": call_id},
        {"role": "system", "content": "Be\nkind."},
    ]
    in_full = [{"role": "user", "content": "hi"}, *first["output"], *given]
    for asked in ({"input": given, "previous_response_id": first["id"]}, {"input": in_full}):
        answer = ask(server, **fields, **asked)
        assert answer.status_code == 200, answer.text
        messages, kwargs = server.frontend.rendered[-1]
        assert messages == expected
        assert kwargs == {"reasoning_effort": "xhigh", "enable_thinking": True, "thinking": True}
        assert server.frontend.rendered_tools[-1] is not None
        assert server.frontend.submitted[-1].sampling.bad_words == ("<tool_call>",)


def test_tools_and_forms() -> None:
    server = api(CALLS)
    ask(server, tools=TOOLS, tool_choice={"type": "function", "name": "now"})
    form = server.frontend.submitted[-1].sampling.structured_outputs
    assert form is not None
    assert '\\"now\\"' in json.dumps(form.structural_tag)
    assert server.frontend.rendered_tools[-1][1] == {"type": "function", "function": {"name": "now"}}
    ask(server, text={"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}})
    form = server.frontend.submitted[-1].sampling.structured_outputs
    assert form is not None
    assert (form.json, form.param) == (SCHEMA, "text.format.schema")
    ask(server, text={"format": {"type": "json_object"}})
    form = server.frontend.submitted[-1].sampling.structured_outputs
    assert form is not None
    assert form.json_object


def test_the_store() -> None:
    server = api()
    first = ask(server).json()
    path = f"/v1/responses/{first['id']}"
    assert server.call("GET", path).json() == first
    streamed = assembled(events(ask(server, stream=True)))
    assert server.call("GET", f"/v1/responses/{streamed['id']}").json() == streamed
    assert error_of(server.call("GET", path + "?stream=true"), 400)["param"] == "stream"
    assert "background" in error_of(server.call("POST", path + "/cancel"), 400)["message"]
    assert server.call("DELETE", path).json() == {"id": first["id"], "object": "response", "deleted": True}
    for method, place in (("GET", path), ("DELETE", path), ("POST", path + "/cancel")):
        assert error_of(server.call(method, place), 404)["code"] == "response_not_found"
    refused = error_of(ask(server, previous_response_id=first["id"]), 400)
    assert (refused["param"], refused["code"]) == ("previous_response_id", "previous_response_not_found")
    unstored = ask(server, store=False).json()
    error_of(server.call("GET", f"/v1/responses/{unstored['id']}"), 404)
    none = api(response_store_bytes=0)
    error_of(none.call("GET", f"/v1/responses/{ask(none).json()['id']}"), 404)


def test_the_store_is_bounded() -> None:
    each = Stored(b"", b"", b"").num_bytes  # bounds the number of small ones
    assert each >= 1000
    store = ResponseStore(100 + 2 * each)
    for name in "abc":
        store.put("", name, Stored(b"x" * 20, b"", b"[]" + b" " * 18))
    assert (len(store), store.num_bytes) == (2, 80 + 2 * each)  # "a" made room
    assert store.get("", "a") is None
    assert store.get("", "b") is not None
    store.put("", "d", Stored(b"x" * 20, b"", b"x" * 20))
    assert store.get("", "c") is None  # "b" was used later
    store.put("", "large", Stored(b"x" * (101 + 2 * each), b"", b""))
    assert (len(store), store.num_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "text": "x"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "x", "name": "a"}]}, "input[0].arguments"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
        ({"text": {"formats": {}}}, "text.formats"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"temperature": -1}, "temperature"),
        ({"background": True, "store": False}, "background"),
        ({"background": True, "stream": True}, "background"),
        ({"background": 1}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"stop": "x"}, "stop"),
    ],
)
def test_bad_input_names_the_field(fields: dict[str, Any], param: str) -> None:
    assert error_of(ask(api(CALLS), **fields), 400)["param"] == param


def test_failures() -> None:
    server = api()
    server.frontend.fail_at = 3
    error_of(ask(server), 500)
    last = events(ask(server, stream=True))[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"
    error_of(server.call("GET", f"/v1/responses/{last['response']['id']}"), 404)
    server.frontend.refusal = ("full", "capacity")
    error_of(ask(server, stream=True), 503)


def test_every_property_of_openai_is_classified() -> None:
    for schema, model, least in (
        ("CreateResponse", protocol.ResponsesRequest, 25),
        ("Reasoning", protocol.Reasoning, 3),
        ("ResponseTextParam", protocol.TextSettings, 2),
        ("TextResponseFormatJsonSchema", protocol.TextFormat, 5),
        ("FunctionTool", FunctionTool, 5),
        ("CustomToolParam", CustomTool, 4),
        ("CustomToolCall", protocol.CustomCallItem, 5),
        ("EasyInputMessage", protocol.MessageItem, 3),
        ("OutputMessage", protocol.MessageItem, 5),
        ("FunctionToolCall", protocol.CallItem, 5),
        ("FunctionCallOutputItemParam", protocol.OutputItem, 3),
        ("ReasoningItem", protocol.ReasoningItem, 4),
        ("OutputTextContent", TextPart, 4),
        ("InputTextContent", TextPart, 2),
    ):
        names = properties(schema)
        assert len(names) >= least, schema
        assert names <= set(field_table(model)), (
            f"{schema}: unclassified: {sorted(names - set(field_table(model)))}"
        )


def test_refused_fields_are_named_and_neutral_values_pass() -> None:
    server = api()
    for name, rule in field_table(protocol.ResponsesRequest).items():
        if rule.use is Use.REFUSED:
            assert error_of(ask(server, **{name: {"odd": 1}}), 400)["param"] == name
            for value in (None, *rule.neutral):
                assert ask(server, **{name: value}).status_code == 200, (name, value)
        elif rule.use is Use.NO_EFFECT:
            assert ask(server, **{name: {"odd": 1}}).status_code == 200, name
