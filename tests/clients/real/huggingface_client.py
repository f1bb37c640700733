"""huggingface_hub's InferenceClient against an address."""

from __future__ import annotations

import json
from typing import Any

from check import ANSWER, CITY, QUESTION, QUILL, SCRIPTED, STORY, TOOL, check, get_weather
from huggingface_hub import AsyncInferenceClient, InferenceClient

quill, scripted = InferenceClient(base_url=QUILL + "/v1"), InferenceClient(base_url=SCRIPTED + "/v1")


@check("a streamed chat is the whole one")
def _() -> None:
    whole = quill.chat_completion(STORY, max_tokens=16, temperature=0.0)
    parts = quill.chat_completion(STORY, max_tokens=16, temperature=0.0, stream=True)
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == whole.choices[0].message.content


@check("the form of openai's package")
def _() -> None:
    answer = quill.chat.completions.create(
        model="quill", messages=STORY, max_tokens=8, logprobs=True, top_logprobs=2, seed=1
    )
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2


@check("a schema, in each of its forms")
def _() -> None:
    schema = {**CITY, "title": "City"}
    for form in (
        {"type": "json_schema", "json_schema": {"name": "City", "schema": schema, "strict": True}},
        {"type": "json_object", "value": schema},
    ):
        answer = quill.chat_completion(STORY, response_format=form, max_tokens=400)
        assert json.loads(answer.choices[0].message.content)["city"] in ("Bern", "Zürich")


@check("calls, whole and streamed, several turns")
def _() -> None:
    turns: list[Any] = [{"role": "user", "content": QUESTION}]
    required = quill.chat_completion(turns, tools=[TOOL], tool_choice="required", max_tokens=400)
    assert required.choices[0].message.tool_calls[0].function.name == "get_weather"
    first = scripted.chat_completion(turns, tools=[TOOL], tool_choice="auto")
    (call,) = first.choices[0].message.tool_calls
    parts = list(scripted.chat_completion(turns, tools=[TOOL], stream=True))
    pieces = [c for part in parts for choice in part.choices for c in choice.delta.tool_calls or ()]
    assert "".join(c.function.arguments for c in pieces) == call.function.arguments
    result = get_weather(**json.loads(call.function.arguments))
    turns += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    last = scripted.chat_completion(turns, tools=[TOOL])
    assert last.choices[0].message.content == ANSWER


@check("run of an async client")
async def _() -> None:
    async with AsyncInferenceClient(base_url=QUILL + "/v1") as client:
        assert (await client.chat_completion(STORY, max_tokens=8)).choices
