"""OpenAI's Agents SDK over chat completions and over Responses, whole and streamed."""

from __future__ import annotations

from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    handoff,
    set_tracing_disabled,
)
from check import ANSWER, QUESTION, QUILL, SCRIPTED, check
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)


@function_tool
def get_weather(city: Literal["Bern", "Zürich"]) -> str:
    """The weather in a city."""
    return f"12 °C in {city}"


class Trip(BaseModel):
    """A trip."""

    city: Literal["Bern", "Zürich"]
    days: Literal[1, 2, 3]


def models(url: str) -> list[Any]:
    """One model for each API at an address."""
    client = AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    return [OpenAIChatCompletionsModel("quill", client), OpenAIResponsesModel("quill", client)]


@check("an agent with a tool goes round by itself")
async def _() -> None:
    for model in models(SCRIPTED):
        agent = Agent("weather", instructions="Be brief.", model=model, tools=[get_weather])
        assert (await Runner.run(agent, QUESTION)).final_output == ANSWER


@check("a streamed agent; the conversation goes on")
async def _() -> None:
    for model in models(SCRIPTED):
        agent = Agent("weather", model=model, tools=[get_weather])
        result = Runner.run_streamed(agent, QUESTION)
        assert [event async for event in result.stream_events()]
        assert result.final_output == ANSWER
        items: list[Any] = [*result.to_input_list(), {"role": "user", "content": QUESTION}]
        assert (await Runner.run(agent, items)).final_output == ANSWER


@check("a required call of Quill's, then its answer")
async def _() -> None:
    settings = ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=400, temperature=0)
    for model in models(QUILL):
        agent = Agent(
            "weather", model=model, tools=[get_weather], model_settings=settings,
            tool_use_behavior="stop_on_first_tool",
        )  # fmt: skip
        assert "12 °C in" in (await Runner.run(agent, QUESTION)).final_output


@check("typed output; handoffs are tools")
async def _() -> None:
    settings = ModelSettings(max_tokens=400, temperature=0)
    for model in models(QUILL):
        other = Agent("other", model=model)
        agent = Agent(
            "trips", model=model, output_type=Trip, model_settings=settings, handoffs=[handoff(other)]
        )
        assert isinstance((await Runner.run(agent, "Where to?")).final_output, Trip)
