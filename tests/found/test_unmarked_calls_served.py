"""A model that writes its calls without the template's mark (Qwen2.5-Coder under ``auto``), at every endpoint."""

from __future__ import annotations

import json
from typing import Any

from tests.api.asgi_client import Api, events
from tests.api.fake_frontend import FakeFrontend, say

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
TEXT = '{"name": "look", "arguments": {"city": "Bern"}}'
ASK = [{"role": "user", "content": "hi"}]


def _server(text: str = TEXT) -> Api:
    return Api(FakeFrontend(lambda *_: say(text)), tool_format="hermes")


def test_calls_without_a_mark_are_calls_and_timing_says_so() -> None:
    answer = _server().chat(messages=ASK, tools=TOOLS, timing=True).json()
    (choice,) = answer["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert json.loads(call["function"]["arguments"]) == {"city": "Bern"}
    assert answer["timing"]["unmarked_calls"] is True
    chunks = events(_server().chat(messages=ASK, tools=TOOLS, timing=True, stream=True))
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == ""
    assert [c["function"]["name"] for d in deltas for c in d.get("tool_calls", ()) if c.get("id")] == ["look"]
    assert [chunk["timing"]["unmarked_calls"] for chunk in chunks if "timing" in chunk] == [True]


def test_other_endpoints_read_them_alike() -> None:
    body: dict[str, Any] = {"messages": ASK, "max_tokens": 99}
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    blocks = _server().post("/v1/messages", {**body, "tools": tools}).json()["content"]
    assert [block["type"] for block in blocks] == ["tool_use"]
    flat = [{"type": "function", **TOOLS[0]["function"]}]  # type: ignore[dict-item]
    output = _server().post("/v1/responses", {"input": "hi", "tools": flat}).json()["output"]
    assert [item["type"] for item in output] == ["function_call"]


def test_only_with_tools_and_without_a_form() -> None:
    form = {"type": "json_object"}
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": TOOLS, "response_format": form}):
        answer = _server().chat(messages=ASK, timing=True, **fields).json()
        assert answer["choices"][0]["message"]["content"] == TEXT
        assert "unmarked_calls" not in answer["timing"]
