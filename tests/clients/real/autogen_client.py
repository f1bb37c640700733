"""AutoGen's assistant over OpenAIChatCompletionClient: tools over two turns, streamed; an answer by a schema."""

from __future__ import annotations

from typing import Literal

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import ModelClientStreamingChunkEvent
from autogen_core.models import UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient
from check import ANSWER, QUESTION, QUILL, SCRIPTED, STORY, check, get_weather
from pydantic import BaseModel

CAN = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True,
       "family": "unknown", "multiple_system_messages": True}  # fmt: skip


class City(BaseModel):
    city: Literal["Bern", "Zürich"]


def model(url: str) -> OpenAIChatCompletionClient:
    return OpenAIChatCompletionClient(
        model="quill", base_url=url + "/v1", api_key="none", model_info=CAN, max_tokens=400
    )


def agent(*, stream: bool) -> AssistantAgent:
    return AssistantAgent(
        "helper", model(SCRIPTED), tools=[get_weather], reflect_on_tool_use=True, model_client_stream=stream
    )


@check("two turns with a tool")
async def _() -> None:
    helper = agent(stream=False)
    for _ in range(2):
        done = await helper.run(task=QUESTION)
        assert done.messages[-1].content == ANSWER, done


@check("a turn with a tool, streamed")
async def _() -> None:
    events = [event async for event in agent(stream=True).run_stream(task=QUESTION)]
    parts = [event.content for event in events if isinstance(event, ModelClientStreamingChunkEvent)]
    assert "".join(parts).endswith(ANSWER), parts
    assert len(parts) > 1, parts


@check("an answer by a schema")
async def _() -> None:
    turns = [UserMessage(content=STORY[0]["content"], source="user")]
    answer = await model(QUILL).create(turns, json_output=City)
    assert City.model_validate_json(answer.content), answer
