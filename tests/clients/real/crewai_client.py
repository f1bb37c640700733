"""CrewAI's LLM and agent: a call of a tool and the answer over two turns, streamed; an answer by a schema."""

from __future__ import annotations

import os
from typing import Literal

os.environ |= {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "OTEL_SDK_DISABLED": "true",
    "CREWAI_TRACING_ENABLED": "false",
}

from check import ANSWER, QUESTION, QUILL, SCRIPTED, STORY, TOOL, check, get_weather
from crewai import LLM, Agent
from crewai.tools import tool
from pydantic import BaseModel


class City(BaseModel):
    city: Literal["Bern", "Zürich"]


def model(url: str, **fields: object) -> LLM:
    return LLM(model="openai/quill", base_url=url + "/v1", api_key="none", max_tokens=400, **fields)


@check("an agent with a tool, twice")
def _() -> None:
    for _ in range(2):
        helper = Agent(
            role="helper", goal="Answer.", backstory="None.", llm=model(SCRIPTED), tools=[tool(get_weather)]
        )
        answer = helper.kickoff(QUESTION)
        assert ANSWER in answer.raw, answer


@check("a call, streamed")
def _() -> None:
    llm = model(SCRIPTED, stream=True)
    turns = [{"role": "user", "content": QUESTION}]
    answer = llm.call(turns, tools=[TOOL], available_functions={"get_weather": get_weather})
    assert answer == "12 °C in Zürich", answer
    assert model(QUILL, stream=True).call(STORY)


@check("an answer by a schema")
def _() -> None:
    answer = model(QUILL).call(STORY, response_model=City)
    city = answer if isinstance(answer, City) else City.model_validate_json(answer)
    assert city.city in ("Bern", "Zürich"), answer
