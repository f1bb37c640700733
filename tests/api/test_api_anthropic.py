"""Anthropic's Messages API: blocks, events, what the template sees, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from tests.api.asgi_client import Api
from tests.api.fake_frontend import FakeFrontend, say

from quire.api.dialects.anthropic import request as protocol
from quire.http.field_rules import Use, field_table

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"name": "get", "description": "d", "input_schema": SCHEMA}, {"name": "now", "input_schema": {}}]
CALLS = (
    '<think>Hm.</think>Sure.\n<tool_call>\n{"name": "get", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
)
USER = {"role": "user", "content": "hi"}


def api(text: str = "Hello 🙂", **settings: Any) -> Api:
    return Api(
        FakeFrontend(lambda prompt, index, seed: say(text), thinks=True), tool_format="hermes", **settings
    )


def ask(server: Api, **fields: Any) -> httpx.Response:
    return server.post("/v1/messages", {"max_tokens": 200, "messages": [USER], **fields})


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        event, data = block.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert event == f"event: {value['type']}"
        found.append(value)
    return found


def assembled(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events make; their order is checked."""
    assert [found[0]["type"], found[-2]["type"], found[-1]["type"]] == [
        "message_start", "message_delta", "message_stop",
    ]  # fmt: skip
    message = found[0]["message"]
    assert message["content"] == []
    texts: list[str] = []
    for event in found[1:-2]:
        kind = event["type"]
        if kind == "content_block_start":
            assert event["index"] == len(message["content"]) == len(texts)
            message["content"].append(event["content_block"])
            texts.append("")
        elif kind == "content_block_delta":
            assert event["index"] == len(texts) - 1
            (text,) = [v for k, v in event["delta"].items() if k != "type"]
            assert text
            texts[-1] += text
        else:
            assert kind == "content_block_stop"
            block = message["content"][event["index"]]
            assert event["index"] == len(texts) - 1
            if block["type"] == "tool_use":
                block["input"] = json.loads(texts[-1] or "{}")
            else:
                block[block["type"]] = texts[-1]
    message.update(found[-2]["delta"])
    message["usage"].update(found[-2]["usage"])
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    assert message["id"].startswith("msg_")
    blocks = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    assert all(
        block["id"].startswith("toolu_") for block in message["content"] if block["type"] == "tool_use"
    )
    return {**message, "id": "", "content": blocks}


def error_of(response: httpx.Response, status: int = 400) -> str:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"type", "error"}
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    return str(body["error"]["message"])


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("Hello 🙂", {}),
        ("Hello 🙂", {"stop_sequences": ["lo"]}),
        ("Hello 🙂", {"max_tokens": 3}),
        ("", {}),
        (CALLS, {"tools": TOOLS}),
        (CALLS, {"tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
        (CALLS, {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
        (CALLS, {"thinking": {"type": "adaptive", "display": "omitted"}, "tools": TOOLS}),
    ],
)
def test_stream_equals_whole(text: str, fields: dict[str, Any]) -> None:
    whole = ask(api(text), **fields).json()
    streamed = assembled(events(ask(api(text), stream=True, **fields)))
    assert without_ids(streamed) == without_ids(whole)


def test_a_message() -> None:
    message = ask(api()).json()
    assert message["type"] == "message"
    assert message["role"] == "assistant"
    assert message["model"] == "tiny"
    assert message["content"] == [{"type": "text", "text": "Hello 🙂"}]
    assert message["stop_reason"] == "end_turn"
    assert message["usage"] == {
        "input_tokens": len("<user>hi") - 3,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 3,
        "output_tokens": len(say("Hello 🙂")),
    }


def test_why_it_stopped() -> None:
    cut = ask(api(), max_tokens=2).json()
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)
    stopped = ask(api(), stop_sequences=["xyz", "lo"]).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "lo")
    assert stopped["content"] == [{"type": "text", "text": "Hel"}]
    assert ask(api(CALLS), tools=TOOLS).json()["stop_reason"] == "tool_use"


def test_thinking_text_and_calls_in_order() -> None:
    content = ask(api(CALLS), tools=TOOLS).json()["content"]
    assert [block["type"] for block in content] == ["thinking", "text", "tool_use", "tool_use"]
    assert content[0] == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert content[1]["text"] == "Sure."
    assert [(block["name"], block["input"]) for block in content[2:]] == [
        ("get", {"city": "Zürich"}),
        ("now", {}),
    ]
    one = ask(api(CALLS), tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True}).json()
    assert [block["type"] for block in one["content"]] == ["thinking", "text", "tool_use"]


def test_a_cut_call_keeps_its_text() -> None:
    fields = {"tools": TOOLS, "max_tokens": len(CALLS[: CALLS.index("ity")].encode())}
    message = ask(api(CALLS), **fields).json()
    assert message["stop_reason"] == "max_tokens"
    assert message["content"][-1]["input"] == {"malformed_arguments": '{"c'}
    found = events(ask(api(CALLS), **fields, stream=True))
    deltas = [
        event["delta"].get("partial_json", "") for event in found if event["type"] == "content_block_delta"
    ]
    assert "".join(deltas) == '{"c'


def test_the_template_sees_the_conversation() -> None:
    server = api()
    messages = [
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "text", "text": "Sure."},
                {"type": "tool_use", "id": "t1", "name": "get", "input": {"city": "Bern"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "text", "text": "And?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]
    config = {"effort": "max"}
    answer = ask(server, messages=messages, system=system, tools=TOOLS, max_tokens=8, output_config=config,
                 thinking={"type": "disabled"})  # fmt: skip
    assert answer.status_code == 200, answer.text
    seen, kwargs = server.frontend.rendered[-1]
    call = {"type": "function", "function": {"name": "get", "arguments": {"city": "Bern"}}, "id": "t1"}
    assert seen == [
        {"role": "system", "content": "Be\nbrief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Sure.", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "t1", "name": "get"},
        {"role": "user", "content": "And?"},
    ]
    assert kwargs == {"reasoning_effort": "xhigh", "enable_thinking": False, "thinking": False}
    assert server.frontend.rendered_tools[-1][0] == {
        "type": "function", "function": {"name": "get", "description": "d", "parameters": SCHEMA},
    }  # fmt: skip


def test_sampling_reaches_the_engine() -> None:
    server = api()
    ask(server, temperature=0.3, top_p=0.5, top_k=7, stop_sequences=["x"], seed=3, metadata={"user_id": "u"})
    submitted = server.frontend.submitted[-1]
    sampling = submitted.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.3, 0.5, 7)
    assert (tuple(sampling.stop), sampling.seed, sampling.max_tokens) == (("x",), 3, 200)
    assert submitted.kwargs["tenant"] == "u"


def test_a_last_assistant_message_is_continued() -> None:
    server = api()
    ask(server, messages=[USER, {"role": "assistant", "content": "Hel"}])
    _, kwargs = server.frontend.rendered[-1]
    assert kwargs == {"continue_final_message": True, "add_generation_prompt": False}


def test_choices_and_forms_constrain() -> None:
    for choice, names in (({"type": "any"}, ["get", "now"]), ({"type": "tool", "name": "now"}, ["now"])):
        server = api(CALLS)
        assert ask(server, tools=TOOLS, tool_choice=choice).status_code == 200
        form = server.frontend.submitted[-1].sampling.structured_outputs
        assert form is not None
        text = json.dumps(form.structural_tag)
        assert [name for name in ("get", "now") if f'\\"{name}\\"' in text] == names
    server = api(CALLS)
    ask(server, tools=TOOLS, tool_choice={"type": "none"})
    assert server.frontend.rendered_tools[-1] is not None
    assert server.frontend.submitted[-1].sampling.bad_words == ("<tool_call>",)
    ask(server, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    form = server.frontend.submitted[-1].sampling.structured_outputs
    assert form is not None
    assert (form.json, form.param) == (SCHEMA, "output_config.format.schema")


def test_count_tokens() -> None:
    body = {"messages": [USER], "system": "Be brief."}
    count = api().post("/v1/messages/count_tokens", body).json()
    assert count == {"input_tokens": len("<system>Be brief.<user>hi")}
    usage = ask(api(), system="Be brief.").json()["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count["input_tokens"]
    passed = api().post("/v1/messages/count_tokens", {**body, "max_tokens": 3})
    assert (passed.json(), passed.headers["x-quire-ignored-fields"]) == (count, "max_tokens")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens is required"),
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"max_tokens": 100000}, "max_tokens"),
        ({"messages": []}, "messages = []"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role = 'tool'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is required"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]},
            "messages[0].content[0].text = 3",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "no"}]}]},
            "messages[0].content[0].tool_use_id = 'no'",
        ),
        (
            {"messages": [{"role": "assistant", "content": [
                {"type": "tool_use", "id": "a", "name": "get", "input": {}}]}]},
            "messages[0] ends with tool_use",
        ),
        ({"system": 3}, "system = 3"),
        ({"system": [{"text": "no type"}]}, "system[0]"),
        ({"stop_sequences": "x"}, "stop_sequences = 'x'"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"temperature": "1"}, "temperature = '1'"),
        ({"temperature": -1}, "temperature = -1"),
        ({"top_k": -5}, "top_k"),
        ({"thinking": {"type": "on"}}, "thinking.type = 'on'"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name = 'a b'"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema is required"),
        ({"tools": [{"name": "web_search", "type": "web_search_20250305"}]}, "tools[0].type"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice names 'other'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "json_schema", "schema": 3}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "regex"}}}, "output_config.format.type"),
        ({"metadata": {"userid": "x"}}, "metadata.userid"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
    ],
)  # fmt: skip
def test_bad_input_names_the_field(fields: dict[str, Any], named: str) -> None:
    assert named in error_of(ask(api(CALLS), **fields))


def test_errors_have_anthropics_form() -> None:
    server = api()
    error_of(ask(server, model="other"), 404)
    error_of(server.call("GET", "/v1/messages"), 405)
    error_of(server.call("GET", "/v1/messages/nothing"), 404)
    error_of(server.call("POST", "/v1/messages", content=b"{"), 400)
    server.frontend.fail_at = 3
    last = events(ask(server, stream=True))[-1]
    assert last == {"type": "error", "error": {"type": "api_error", "message": last["error"]["message"]}}
    server.frontend.refusal = ("full", "capacity")
    refused = ask(server, stream=True)
    error_of(refused, 503)
    assert refused.json()["error"]["type"] == "overloaded_error"
    assert refused.headers["retry-after"] == "1"


def test_refused_fields_are_named_and_neutral_values_pass() -> None:
    server = api()
    for name, rule in field_table(protocol.MessagesRequest).items():
        if rule.use is Use.REFUSED:
            assert name in error_of(ask(server, **{name: {"odd": 1}}))
            for value in (None, *rule.neutral):
                assert ask(server, **{name: value}).status_code == 200, (name, value)
        elif rule.use is Use.NO_EFFECT:
            assert ask(server, **{name: {"odd": 1}}).status_code == 200, name
