"""The anthropic package: messages, streams, tools, the tool runner, schemas, counts and batches."""

from __future__ import annotations

from typing import Any, Literal

import anthropic
from anthropic import beta_tool
from check import ANSWER, CITY, QUESTION, QUILL, SCRIPTED, STORY, check, error_of, get_weather
from pydantic import BaseModel

quill = anthropic.Anthropic(base_url=QUILL, api_key="none", max_retries=0)
scripted = anthropic.Anthropic(base_url=SCRIPTED, api_key="none", max_retries=0)
GREEDY: dict[str, Any] = {"temperature": 0}  # the client has dropped the field
PARAMS: dict[str, Any] = {"model": "quill", "max_tokens": 16, "messages": STORY}
ANEW: dict[str, Any] = {**PARAMS, "extra_body": GREEDY}
TOOL: Any = {"name": "get_weather", "description": "The weather in a city.", "input_schema": CITY}


@check("a streamed message is the whole one")
def _() -> None:
    whole = quill.messages.create(**ANEW)
    with quill.messages.stream(**ANEW) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert whole.stop_reason == final.stop_reason


@check("system blocks with cache_control, stop sequences, metadata")
def _() -> None:
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    answer = quill.messages.create(
        **ANEW, system=system, stop_sequences=["the"], metadata={"user_id": "u"}, service_tier="auto"
    )
    assert answer.stop_reason in ("stop_sequence", "max_tokens", "end_turn")


@check("a required call, its result, the answer")
def _() -> None:
    turns: list[Any] = [{"role": "user", "content": QUESTION}]
    first = quill.messages.create(
        model="quill",
        max_tokens=400,
        messages=turns,
        tools=[TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    call = first.content[-1]
    assert (first.stop_reason, call.type) == ("tool_use", "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": get_weather(**call.input)}
    turns += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = quill.messages.create(
        model="quill", max_tokens=16, messages=turns, tools=[TOOL], tool_choice={"type": "none"}
    )
    assert second.content[0].type == "text"


@check("streamed thinking and a streamed call, several turns")
def _() -> None:
    turns: list[Any] = [{"role": "user", "content": QUESTION}]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    fields: dict[str, Any] = {"model": "quill", "max_tokens": 2000, "tools": [TOOL], "thinking": thinking}
    with scripted.messages.stream(messages=turns, **fields) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "tool_use"]
    assert final.content[1].input == {"city": "Zürich"}
    result = {"type": "tool_result", "tool_use_id": final.content[1].id, "is_error": False,
              "content": [{"type": "text", "text": get_weather(**final.content[1].input)}]}  # fmt: skip
    turns += [{"role": "assistant", "content": final.content}, {"role": "user", "content": [result]}]
    last = scripted.messages.create(messages=turns, **fields)
    assert last.content[-1].text == ANSWER


@check("the tool runner goes round by itself, whole and streamed")
def _() -> None:
    tool = beta_tool(get_weather)
    turns: list[Any] = [{"role": "user", "content": QUESTION}]
    runner = scripted.beta.messages.tool_runner(model="quill", max_tokens=200, tools=[tool], messages=turns)
    assert runner.until_done().content[-1].text == ANSWER
    streams = scripted.beta.messages.tool_runner(
        model="quill", max_tokens=200, tools=[tool], messages=turns, stream=True
    )
    assert [stream.get_final_message() for stream in streams][-1].content[-1].text == ANSWER


class Trip(BaseModel):
    city: Literal["Bern", "Zürich"]
    days: Literal[1, 2, 3]


@check("messages.parse fills a pydantic model")
def _() -> None:
    answer = quill.messages.parse(model="quill", max_tokens=400, messages=STORY, output_format=Trip)
    assert isinstance(answer.parsed_output, Trip)


@check("tokens are counted, models listed")
def _() -> None:
    counted = quill.messages.count_tokens(model="quill", messages=STORY)
    assert counted.input_tokens == quill.messages.create(**ANEW).usage.input_tokens
    assert [model.id for model in quill.models.list()] == ["quill"]


@check("batches of messages")
def _() -> None:
    batch = quill.messages.batches.create(requests=[{"custom_id": "a", "params": {**PARAMS, **GREEDY}}])
    while quill.messages.batches.retrieve(batch.id).processing_status != "ended":
        pass
    (result,) = quill.messages.batches.results(batch.id)
    assert result.result.message.content[0].text == quill.messages.create(**ANEW).content[0].text


@check("run of an async client")
async def _() -> None:
    client = anthropic.AsyncAnthropic(base_url=QUILL, api_key="none", max_retries=0)
    async with client.messages.stream(**ANEW) as stream:
        assert (await stream.get_final_message()).content


@check("errors are the client's")
def _() -> None:
    error_of(anthropic.NotFoundError, lambda: quill.messages.create(**{**ANEW, "model": "claude-9"}))
