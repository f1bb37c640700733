"""LlamaIndex's OpenAILike: an agent with a tool over two turns, streamed; an answer by a schema, by a call."""

from __future__ import annotations

from typing import Literal

from check import ANSWER, QUESTION, QUILL, SCRIPTED, STORY, check, get_weather
from llama_index.core.agent.workflow import AgentStream, FunctionAgent
from llama_index.core.tools import FunctionTool
from llama_index.core.workflow import Context
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class City(BaseModel):
    """A city."""

    city: Literal["Bern", "Zürich"]


def model(url: str) -> OpenAILike:
    return OpenAILike(
        model="quill", api_base=url + "/v1", api_key="none", is_chat_model=True, is_function_calling_model=True,
        context_window=8192, max_tokens=400,
    )  # fmt: skip


def agent(*, streaming: bool) -> FunctionAgent:
    return FunctionAgent(
        tools=[FunctionTool.from_defaults(get_weather)], llm=model(SCRIPTED), streaming=streaming
    )


@check("two turns with a tool")
async def _() -> None:
    helper = agent(streaming=False)
    context = Context(helper)
    for _ in range(2):
        answer = await helper.run(user_msg=QUESTION, ctx=context)
        assert str(answer) == ANSWER, answer


@check("a turn with a tool, streamed")
async def _() -> None:
    handler = agent(streaming=True).run(user_msg=QUESTION)
    parts = [event.delta async for event in handler.stream_events() if isinstance(event, AgentStream)]
    assert str(await handler) == ANSWER, parts
    assert len([part for part in parts if part]) > 1, parts


@check("an answer by a schema")
def _() -> None:
    answer = model(QUILL).as_structured_llm(City).complete(STORY[0]["content"])
    assert answer.raw.city in ("Bern", "Zürich"), answer
