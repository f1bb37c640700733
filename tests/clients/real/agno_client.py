"""Agno's agent over an OpenAI-like model: tools over two turns of a session, streamed; an answer by a schema."""

from __future__ import annotations

from typing import Literal

from agno.agent import Agent
from agno.db.in_memory import InMemoryDb
from agno.models.openai.like import OpenAILike
from check import ANSWER, QUESTION, QUILL, SCRIPTED, STORY, check, get_weather
from pydantic import BaseModel


class City(BaseModel):
    city: Literal["Bern", "Zürich"]


def model(url: str) -> OpenAILike:
    return OpenAILike(id="quill", base_url=url + "/v1", api_key="none", max_tokens=400)


def agent() -> Agent:
    return Agent(
        model=model(SCRIPTED),
        tools=[get_weather],
        db=InMemoryDb(),
        add_history_to_context=True,
        telemetry=False,
    )


@check("two turns with a tool")
def _() -> None:
    helper = agent()
    for _ in range(2):
        answer = helper.run(QUESTION, session_id="1")
        assert answer.content.endswith(ANSWER), answer.content
        assert answer.tools[0].result == "12 °C in Zürich", answer.tools


@check("a turn with a tool, streamed")
def _() -> None:
    parts = [event.content for event in agent().run(QUESTION, stream=True) if getattr(event, "content", None)]
    assert "".join(map(str, parts)).endswith(ANSWER), parts
    assert len(parts) > 1, parts


@check("an answer by a schema")
def _() -> None:
    answer = Agent(model=model(QUILL), output_schema=City, telemetry=False).run(STORY[0]["content"])
    assert isinstance(answer.content, City), answer.content
