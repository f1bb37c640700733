"""LangChain: its chat models for OpenAI, Anthropic and Ollama, and an agent that goes round by itself."""

from __future__ import annotations

from typing import Any, Literal

from check import ANSWER, QUESTION, QUILL, SCRIPTED, check
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel


class City(BaseModel, extra="forbid"):
    """A city."""

    city: Literal["Bern", "Zürich"]


@tool(args_schema=City)
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"12 °C in {city}"


class Trip(BaseModel, extra="forbid"):
    """A trip."""

    city: Literal["Bern", "Zürich"]
    days: Literal[1, 2, 3]


def models(url: str) -> list[Any]:
    """One model for each dialect at an address."""
    return [
        ChatOpenAI(model="quill", base_url=url + "/v1", api_key="none", max_tokens=400, max_retries=0),
        ChatOpenAI(
            model="quill", base_url=url + "/v1", api_key="none", max_tokens=400, max_retries=0,
            use_responses_api=True,
        ),
        ChatAnthropic(model="quill", base_url=url, api_key="none", max_tokens=400, max_retries=0),
        ChatOllama(model="quill", base_url=url, num_predict=400),
    ]  # fmt: skip


@check("texts, whole and streamed, of three dialects and Responses")
def _() -> None:
    for model in models(QUILL):
        assert model.invoke("Tell me a story.").content
        assert [chunk.content for chunk in model.stream("Tell me a story.")]


@check("a required call of Quill's")
def _() -> None:
    for model in models(QUILL)[:3]:
        answer = model.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False).invoke(
            QUESTION
        )
        assert len(answer.tool_calls) == 1, (model, answer)
        (call,) = answer.tool_calls
        assert get_weather.invoke(call["args"]).startswith("12 °C in")


@check("a call, its result, the answer, of each dialect, streamed")
def _() -> None:
    for model in models(SCRIPTED):
        bound = model.bind_tools([get_weather])
        turns: list[Any] = [HumanMessage(QUESTION)]
        first: Any = None
        for chunk in bound.stream(turns):
            first = chunk if first is None else first + chunk
        (call,) = first.tool_calls
        assert call["args"] == {"city": "Zürich"}
        result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
        last = bound.invoke([*turns, first, result])
        assert last.text == ANSWER, last


@check("an agent goes round by itself")
def _() -> None:
    for model in models(SCRIPTED):
        agent = create_agent(model, [get_weather])
        state = agent.invoke({"messages": [{"role": "user", "content": QUESTION}]})
        assert state["messages"][-1].text == ANSWER


@check("with_structured_output fills a pydantic model")
def _() -> None:
    plain, responses, claude, llama = models(QUILL)
    for model, method in (
        (plain, "json_schema"), (plain, "function_calling"), (responses, "json_schema"), (llama, "json_schema"),
        (claude, "json_schema"),
    ):  # fmt: skip
        assert isinstance(model.with_structured_output(Trip, method=method).invoke("Where to?"), Trip)


@check("completions and embeddings")
def _() -> None:
    text = OpenAI(model="quill", base_url=QUILL + "/v1", api_key="none", max_tokens=8)
    assert text.invoke("Once upon a time")
    vectors = OpenAIEmbeddings(
        model="quill", base_url=QUILL + "/v1", api_key="none", check_embedding_ctx_length=False
    )
    assert len(vectors.embed_documents(["a", "b"])) == 2
