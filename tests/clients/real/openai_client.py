"""The openai package: chat, completions, Responses, tools, schemas, files and batches."""

from __future__ import annotations

import io
import json
from typing import Any, Literal

import openai
from check import ANSWER, FUNCTION, QUESTION, QUILL, SCRIPTED, STORY, TOOL, check, error_of, get_weather
from pydantic import BaseModel

quill = openai.OpenAI(base_url=QUILL + "/v1", api_key="none", max_retries=0)
scripted = openai.OpenAI(base_url=SCRIPTED + "/v1", api_key="none", max_retries=0)
ANEW: dict[str, Any] = {"model": "quill", "temperature": 0, "max_tokens": 16}


class Trip(BaseModel):
    city: Literal["Bern", "Zürich"]
    days: Literal[1, 2, 3]


@check("models are listed")
def _() -> None:
    assert [model.id for model in quill.models.list()] == ["quill"]
    assert quill.models.retrieve("quill").owned_by == "quire"


@check("a streamed chat is the whole one")
def _() -> None:
    whole = quill.chat.completions.create(messages=STORY, **ANEW)
    chunks = quill.chat.completions.create(
        messages=STORY, stream=True, stream_options={"include_usage": True}, **ANEW
    )
    parts = list(chunks)
    assert (
        "".join(p.choices[0].delta.content or "" for p in parts if p.choices)
        == whole.choices[0].message.content
    )
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens


@check("choices, log-probabilities, seed, stop and penalties")
def _() -> None:
    answer = quill.chat.completions.create(
        model="quill", messages=STORY, max_tokens=8, n=2, seed=5, logprobs=True, top_logprobs=3, stop=["\n\n\n"],
        frequency_penalty=0.5, presence_penalty=0.1, logit_bias={"300": -5}, user="me", service_tier="auto",
        metadata={"a": "b"}, store=False,
    )  # fmt: skip
    assert len(answer.choices) == 2
    assert all(len(choice.logprobs.content[0].top_logprobs) == 3 for choice in answer.choices)


@check("completions, several prompts, echo, streamed")
def _() -> None:
    whole = quill.completions.create(prompt=["Once", "It was"], echo=True, logprobs=1, **ANEW)
    assert [choice.text[:4] for choice in whole.choices] == ["Once", "It w"], whole
    parts = quill.completions.create(prompt=["Once", "It was"], echo=True, stream=True, **ANEW)
    texts = ["", ""]
    for part in parts:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


@check("chat.completions.parse fills a pydantic model")
def _() -> None:
    answer = quill.chat.completions.parse(
        model="quill", messages=STORY, response_format=Trip, max_tokens=60, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, Trip)


@check("a required call, its result, the answer")
def _() -> None:
    turns: list[Any] = [{"role": "user", "content": QUESTION}]
    first = quill.chat.completions.create(
        model="quill",
        messages=turns,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=400,
    )
    assert first.choices[0].finish_reason == "tool_calls", first
    (call,) = first.choices[0].message.tool_calls
    result = get_weather(**json.loads(call.function.arguments))
    turns += [
        first.choices[0].message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": result},
    ]
    second = quill.chat.completions.create(messages=turns, tools=[TOOL], tool_choice="none", **ANEW)
    assert second.choices[0].message.content is not None, second


@check("chat.completions.stream puts a call and reasoning together")
def _() -> None:
    turns: list[Any] = [{"role": "user", "content": QUESTION}]
    strict = {"type": "function", "function": {**FUNCTION, "strict": True}}
    with scripted.chat.completions.stream(model="quill", messages=turns, tools=[strict]) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert [event.parsed_arguments for event in done] == [{"city": "Zürich"}]
    (call,) = final.choices[0].message.tool_calls
    turns += [
        final.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": get_weather(**call.function.parsed_arguments)},
    ]
    last = scripted.chat.completions.create(model="quill", messages=turns, tools=[TOOL])
    assert last.choices[0].message.content == ANSWER


@check("run of an async client")
async def _() -> None:
    async with openai.AsyncOpenAI(base_url=QUILL + "/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(messages=STORY, stream=True, **ANEW)
        assert [chunk async for chunk in stream]


@check("Responses: text, stream, what went before, stored, deleted")
def _() -> None:
    first = quill.responses.create(
        model="quill", input="Tell me a story.", max_output_tokens=16, temperature=0
    )
    assert first.output_text
    with quill.responses.stream(
        model="quill", input="Tell me a story.", max_output_tokens=16, temperature=0
    ) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == first.output_text
    second = quill.responses.create(
        model="quill", input="Go on.", previous_response_id=first.id, max_output_tokens=16,
        instructions="Be brief.", text={"verbosity": "low"}, reasoning={"effort": "low"},
    )  # fmt: skip
    assert second.usage.input_tokens > first.usage.input_tokens
    assert quill.responses.retrieve(first.id).id == first.id
    assert quill.responses.input_items.list(second.id).data
    quill.responses.delete(first.id)


@check("Responses: parse fills a pydantic model")
def _() -> None:
    answer = quill.responses.parse(
        model="quill", input="Where to?", text_format=Trip, max_output_tokens=60, temperature=0
    )
    assert isinstance(answer.output_parsed, Trip)


@check("Responses: calls and their results in several turns")
def _() -> None:
    tool: Any = {"type": "function", "strict": True, **FUNCTION}
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    first = scripted.responses.create(model="quill", input=items, tools=[tool], include=[])
    items += first.output
    call = next(item for item in first.output if item.type == "function_call")
    result = get_weather(**json.loads(call.arguments))
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    counted = scripted.responses.input_tokens.count(model="quill", input=items, tools=[tool])
    second = scripted.responses.create(model="quill", input=items, tools=[tool], stream=True)
    done = next(event for event in second if event.type == "response.completed")
    assert done.response.output_text == ANSWER
    assert done.response.usage.input_tokens == counted.input_tokens


@check("embeddings, in base64 and as floats")
def _() -> None:
    coded = quill.embeddings.create(model="quill", input=["one", "two"])
    plain = quill.embeddings.create(model="quill", input=["one", "two"], encoding_format="float")
    assert coded.data[0].embedding == plain.data[0].embedding


@check("a file, a batch, its results")
def _() -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
            "body": {"model": "quill", "messages": STORY, "max_tokens": 4}}  # fmt: skip
    source = io.BytesIO(json.dumps(line).encode())
    file = quill.files.create(file=("in.jsonl", source), purpose="batch")
    batch = quill.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    while (batch := quill.batches.retrieve(batch.id)).status not in ("completed", "failed"):
        pass
    (answer,) = map(json.loads, quill.files.content(batch.output_file_id).text.splitlines())
    assert answer["response"]["body"]["choices"]


@check("errors are the client's")
def _() -> None:
    create = quill.chat.completions.create
    error = error_of(openai.NotFoundError, lambda: create(model="gpt-9", messages=STORY))
    assert error.code == "model_not_found"
    error = error_of(openai.BadRequestError, lambda: create(model="quill", messages=STORY, temperature=-1))
    assert error.param == "temperature"
