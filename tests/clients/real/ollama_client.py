"""The ollama package: chat, generate, tools, schemas, vectors, models."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import ollama
from check import ANSWER, QUESTION, QUILL, SCRIPTED, STORY, check, error_of, get_weather
from pydantic import BaseModel

quill, scripted = ollama.Client(host=QUILL), ollama.Client(host=SCRIPTED)
OPTIONS: dict[str, Any] = {"temperature": 0, "num_predict": 16, "num_ctx": 2048, "seed": 1}


class Trip(BaseModel, extra="forbid"):
    city: Literal["Bern", "Zürich"]
    days: Literal[1, 2, 3]


@check("a streamed chat is the whole one")
def _() -> None:
    whole = quill.chat("quill", messages=STORY, options=OPTIONS)
    parts = list(quill.chat("quill", messages=STORY, options=OPTIONS, stream=True, keep_alive="5m"))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert parts[-1].eval_count == whole.eval_count
    assert parts[-1].done_reason == whole.done_reason


@check("generate goes on with its context; raw, system")
def _() -> None:
    first = quill.generate("quill", "Hello", system="Be brief.", options=OPTIONS)
    assert quill.generate("quill", "More", context=first.context, options=OPTIONS).prompt_eval_count > len(
        first.context
    )
    assert quill.generate("quill", "Once", raw=True, options=OPTIONS).response


@check("a schema fills a pydantic model")
def _() -> None:
    answer = quill.chat(
        "quill", messages=STORY, format=Trip.model_json_schema(), options={**OPTIONS, "num_predict": 60}
    )
    Trip.model_validate_json(answer.message.content)


@check("calls with thinking, whole and streamed, several turns")
def _() -> None:
    turns: list[Any] = [{"role": "user", "content": QUESTION}]
    whole = scripted.chat("quill", messages=turns, tools=[get_weather], think=True)
    (call,) = whole.message.tool_calls
    assert (whole.message.thinking, call.function.arguments) == ("I look.", {"city": "Zürich"})
    parts = list(scripted.chat("quill", messages=turns, tools=[get_weather], think=True, stream=True))
    assert [c.function for part in parts for c in part.message.tool_calls or ()] == [call.function]
    result = {"role": "tool", "tool_name": "get_weather", "content": get_weather(**call.function.arguments)}
    last = scripted.chat("quill", messages=[*turns, whole.message, result], tools=[get_weather])
    assert last.message.content == ANSWER


@check("vectors; models are listed, shown, loaded")
def _() -> None:
    assert len(quill.embed("quill", ["a", "b"]).embeddings) == 2
    assert quill.embeddings("quill", "a").embedding
    assert quill.list().models[0].model == "quill:latest"
    assert "completion" in quill.show("quill").capabilities
    assert quill.ps().models[0].context_length == 8192
    assert quill.pull("quill").status == "success"
    assert quill.generate("quill").done_reason == "load"


@check("run of an async client")
async def _() -> None:
    client = ollama.AsyncClient(host=QUILL)
    parts = await client.chat("quill", messages=STORY, options=OPTIONS, stream=True)
    assert [part async for part in parts][-1].done
    await asyncio.sleep(0)


@check("errors are the client's")
def _() -> None:
    error = error_of(ollama.ResponseError, lambda: quill.chat("llama3.2", messages=STORY))
    assert error.status_code == 404
