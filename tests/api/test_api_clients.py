"""The official clients over a socket, against the fake frontend: what they put together from a stream is the answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from tests.e2e.live import LiveServer

WRITTEN = (
    '<think>Hm.</think>Sure, 🙂.\n<tool_call>\n{"name": "get", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("fake") / "log"
    with LiveServer(["-m", "tests.api.serve_fake", "0", "5", WRITTEN], Path(log)) as live:
        yield live.url


@pytest.fixture(scope="module")
def claude(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=30) as client:
        yield client


def asked(**fields: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "max_tokens": 300,
        "messages": [{"role": "user", "content": "Weather?"}],
        "tools": [{"name": "get", "input_schema": CITY}, {"name": "now", "input_schema": {"type": "object"}}],
        **fields,
    }


def plain(message: anthropic.types.Message) -> dict[str, Any]:
    """The message without what each answer has anew: its id, and the ids of its calls."""
    value = message.model_dump(exclude_none=True)
    del value["id"]
    for block in value["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
    return value


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": []},
        {"stop_sequences": ["🙂"]},
        {"max_tokens": 30},
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}},
    ],
)
def test_anthropic_stream_equals_whole(claude: anthropic.Anthropic, fields: dict[str, Any]) -> None:
    whole = claude.messages.create(**asked(**fields))
    with claude.messages.stream(**asked(**fields)) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert plain(streamed) == plain(whole)
    assert text == "".join(block.text for block in whole.content if block.type == "text")
    assert whole.content


def test_anthropic_round_trip(claude: anthropic.Anthropic) -> None:
    first = claude.messages.create(**asked())
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert first.stop_reason == "tool_use"
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "rain"}
        for block in first.content
        if block.type == "tool_use"
    ]
    messages = [
        *asked()["messages"],
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    second = claude.messages.create(**asked(messages=messages))
    assert second.usage.input_tokens > first.usage.input_tokens
    fields = {name: value for name, value in asked(messages=messages).items() if name != "max_tokens"}
    count = claude.messages.count_tokens(**fields).input_tokens
    assert count == second.usage.input_tokens + (second.usage.cache_read_input_tokens or 0)


def test_anthropic_errors(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="other"):
        claude.messages.create(**asked(model="other"))
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        claude.messages.create(**asked(extra_body={"temperature": -1}))


@pytest.fixture(scope="module")
def gpt(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


FUNCTIONS: list[Any] = [
    {"type": "function", "name": "get", "parameters": CITY, "strict": False},
    {"type": "function", "name": "now", "parameters": {"type": "object"}, "strict": False},
]


def plain_response(response: Any) -> dict[str, Any]:
    value: dict[str, Any] = response.model_dump(exclude_none=True)
    for name in ("id", "created_at", "completed_at", "parsed"):
        value.pop(name, None)
    for item in value["output"]:
        for name in ("id", "call_id", "parsed_arguments"):
            item.pop(name, None)
        for part in item.get("content", ()):
            part.pop("parsed", None)
    return value


@pytest.mark.parametrize(
    "fields", [{}, {"tools": []}, {"max_output_tokens": 30}, {"parallel_tool_calls": False}]
)
def test_openai_response_stream_equals_whole(gpt: openai.OpenAI, fields: dict[str, Any]) -> None:
    asked = {"model": "tiny", "input": "Weather?", "tools": FUNCTIONS, **fields}
    whole = gpt.responses.create(**asked)
    text, arguments = "", ""
    last: Any = None
    for event in gpt.responses.create(**asked, stream=True):
        last = event
        if event.type == "response.output_text.delta":
            text += event.delta
        elif event.type == "response.function_call_arguments.delta":
            arguments += event.delta
    assert plain_response(last.response) == plain_response(whole)
    assert text == whole.output_text
    assert arguments == "".join(item.arguments for item in whole.output if item.type == "function_call")
    with gpt.responses.stream(**asked) as stream:
        for event in stream:
            last = event
    assert plain_response(last.response) == plain_response(whole)


def test_openai_response_round_trip(gpt: openai.OpenAI) -> None:
    first = gpt.responses.create(model="tiny", input="Weather?", instructions="Be brief.", tools=FUNCTIONS)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
    outputs: list[Any] = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "rain"}
        for item in first.output
        if item.type == "function_call"
    ]
    by_id = gpt.responses.create(
        model="tiny", input=outputs, previous_response_id=first.id, instructions="Be brief.", tools=FUNCTIONS
    )
    items = [item.model_dump(exclude_none=True) for item in first.output]
    in_full = gpt.responses.create(
        model="tiny",
        input=[{"role": "user", "content": "Weather?"}, *items, *outputs],
        instructions="Be brief.",
        tools=FUNCTIONS,
    )
    assert by_id.usage is not None
    assert in_full.usage is not None
    assert by_id.usage.input_tokens == in_full.usage.input_tokens
    assert gpt.responses.retrieve(first.id).to_dict() == first.to_dict()
    gpt.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        gpt.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        gpt.responses.create(model="tiny", input="x", previous_response_id=first.id)
    with pytest.raises(openai.BadRequestError, match="background"):
        gpt.responses.cancel(by_id.id)
