"""LiteLLM's providers openai, hosted_vllm, anthropic and ollama_chat: several turns with tools, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import litellm
from check import ANSWER, CITY, QUESTION, QUILL, SCRIPTED, STORY, TOOL, check, get_weather

litellm.telemetry = False
litellm.suppress_debug_info = True


def providers(url: str) -> list[dict[str, Any]]:
    """The fields that name a server, one set for each provider."""
    return [
        {"model": "openai/quill", "api_base": url + "/v1", "api_key": "none"},
        {"model": "hosted_vllm/quill", "api_base": url + "/v1"},
        {"model": "anthropic/quill", "api_base": url, "api_key": "none"},
        {"model": "ollama_chat/quill", "api_base": url},
    ]


@check("a streamed chat is the whole one, of each provider")
def _() -> None:
    for provider in providers(QUILL):
        fields = {"messages": STORY, "max_tokens": 16, "temperature": 0, **provider}
        whole = litellm.completion(**fields)
        chunks = list(litellm.completion(stream=True, **fields))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == whole.choices[0].message.content, provider


@check("a call, its result, the answer, of each provider, whole and streamed")
def _() -> None:
    for provider in providers(SCRIPTED):
        for stream in (False, True):
            turns: list[Any] = [{"role": "user", "content": QUESTION}]
            first = litellm.completion(messages=turns, tools=[TOOL], stream=stream, **provider)
            if stream:
                first = litellm.stream_chunk_builder(list(first), messages=turns)
            message = first.choices[0].message
            assert message.tool_calls, (provider, stream, first)
            (call,) = message.tool_calls
            assert json.loads(call.function.arguments) == {"city": "Zürich"}, provider
            result = {"role": "tool", "tool_call_id": call.id, "name": "get_weather",
                      "content": get_weather(**json.loads(call.function.arguments))}  # fmt: skip
            turns += [message, result]
            last = litellm.completion(messages=turns, tools=[TOOL], **provider)
            assert last.choices[0].message.content == ANSWER, (provider, last)
            turns += [last.choices[0].message, {"role": "user", "content": QUESTION}]
            again = litellm.completion(messages=turns, tools=[TOOL], **provider)
            assert again.choices[0].message.tool_calls, (provider, again)


@check("a required call of Quill's")
def _() -> None:
    for provider in providers(QUILL)[:3]:
        answer = litellm.completion(
            messages=[{"role": "user", "content": QUESTION}], tools=[TOOL], tool_choice="required",
            max_tokens=400, **provider,
        )  # fmt: skip
        assert answer.choices[0].message.tool_calls[0].function.name == "get_weather", provider


@check("a schema, of each provider")
def _() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "City", "schema": CITY, "strict": True}}
    for provider in providers(QUILL):
        answer = litellm.completion(messages=STORY, response_format=form, max_tokens=400, **provider)
        text = answer.choices[0].message.content
        assert json.loads(text).get("city") in ("Bern", "Zürich"), (provider, text)


@check("completions, embeddings, Responses, a reranker, async")
async def _() -> None:
    openai, vllm, claude, _ = providers(QUILL)
    text = litellm.text_completion(
        prompt="Once",
        max_tokens=4,
        model="text-completion-openai/quill",
        api_base=QUILL + "/v1",
        api_key="none",
    )
    assert text.choices[0].text
    assert litellm.embedding(input=["a"], **openai).data
    assert litellm.responses(input="Hello", max_output_tokens=16, **openai).output
    assert litellm.rerank(query="a", documents=["b", "c"], **{**vllm, "api_base": QUILL}).results
    assert (await litellm.acompletion(messages=STORY, max_tokens=4, **claude)).choices
