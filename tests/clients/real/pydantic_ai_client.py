"""Pydantic AI: agents over OpenAI's chat and Responses and over Anthropic, with tools and typed output."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from check import ANSWER, QUESTION, QUILL, SCRIPTED, check, get_weather
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

LIMITS: Any = {"max_tokens": 400, "temperature": 0.0}


class Trip(BaseModel, extra="forbid"):
    """A trip."""

    city: Literal["Bern", "Zürich"]
    days: Literal[1, 2, 3]


def models(url: str) -> list[Any]:
    """One model for each dialect at an address."""
    openai = OpenAIProvider(base_url=url + "/v1", api_key="none")
    return [
        OpenAIChatModel("quill", provider=openai),
        OpenAIResponsesModel("quill", provider=openai),
        AnthropicModel("quill", provider=AnthropicProvider(base_url=url, api_key="none")),
    ]


@check("texts")
def _() -> None:
    for model in models(QUILL):
        assert Agent(model, model_settings=LIMITS, retries=3).run_sync("Once upon a time").output


@check("typed output by a schema")
def _() -> None:
    for model in models(QUILL)[:2]:
        agent = Agent(model, output_type=NativeOutput(Trip), model_settings=LIMITS)
        assert isinstance(agent.run_sync("Where to?").output, Trip)


@check("typed output by a required call")
def _() -> None:
    for model in models(QUILL):
        agent = Agent(model, output_type=ToolOutput(Trip), model_settings=LIMITS)
        assert isinstance(agent.run_sync("Where to?").output, Trip)


@check("an agent with a tool goes round by itself")
def _() -> None:
    for model in models(SCRIPTED):
        agent = Agent(model, tools=[get_weather])
        result = agent.run_sync(QUESTION)
        assert result.output == ANSWER
        again = agent.run_sync(QUESTION, message_history=result.all_messages())
        assert again.output == ANSWER


@check("a streamed agent")
def _() -> None:
    async def one(model: Any) -> str:
        async with Agent(model, tools=[get_weather]).run_stream(QUESTION) as run:
            return str(await run.get_output())

    async def all_of_them() -> list[str]:
        return [await one(model) for model in models(SCRIPTED)]

    assert asyncio.run(all_of_them()) == [ANSWER] * 3
