"""smolagents' OpenAIModel: a call of a tool, its result, the answer, twice; streamed; an answer by a schema."""

from __future__ import annotations

import json

from check import ANSWER, CITY, QUESTION, QUILL, SCRIPTED, STORY, check, get_weather
from smolagents import ChatMessage, MessageRole, OpenAIModel, Tool


class Weather(Tool):
    """The shared tool in the form of smolagents."""

    name = "get_weather"
    description = "The weather in a city."
    inputs = {"city": {"type": "string", "description": "Bern or Zürich"}}  # noqa: RUF012
    output_type = "string"

    def forward(self, city: str) -> str:
        return get_weather(city)


def model(url: str) -> OpenAIModel:
    return OpenAIModel(model_id="quill", api_base=url + "/v1", api_key="none", max_tokens=400)


def said(role: MessageRole, text: str) -> ChatMessage:
    return ChatMessage(role=role, content=[{"type": "text", "text": text}])


@check("a call, its result among the texts, the answer, twice")
def _() -> None:
    llm, tool, turns = model(SCRIPTED), Weather(), []
    for _ in range(2):
        turns.append(said(MessageRole.USER, QUESTION))
        first = llm.generate(turns, tools_to_call_from=[tool], tool_choice="auto")
        (call,) = first.tool_calls
        arguments = call.function.arguments
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        assert arguments == {"city": "Zürich"}, call
        # As its agents do: the call and the result are texts of the history.
        turns.append(said(MessageRole.TOOL_CALL, json.dumps(arguments, ensure_ascii=False)))
        turns.append(said(MessageRole.TOOL_RESPONSE, tool(**arguments)))
        last = llm.generate([*turns[:-1], said(MessageRole.USER, "Say hello.")])
        assert last.content == "Hello.", last
        turns.append(said(MessageRole.ASSISTANT, ANSWER))


@check("a call, streamed")
def _() -> None:
    turns = [said(MessageRole.USER, QUESTION)]
    parts = list(model(SCRIPTED).generate_stream(turns, tools_to_call_from=[Weather()], tool_choice="auto"))
    calls = [call for part in parts for call in part.tool_calls or ()]
    text = "".join(call.function.arguments or "" for call in calls if call.function)
    assert json.loads(text) == {"city": "Zürich"}, parts
    texts = [
        part.content for part in model(QUILL).generate_stream([said(MessageRole.USER, STORY[0]["content"])])
    ]
    assert len([text for text in texts if text]) > 1, texts


@check("an answer by a schema")
def _() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "City", "schema": CITY, "strict": True}}
    answer = model(QUILL).generate([said(MessageRole.USER, STORY[0]["content"])], response_format=form)
    assert json.loads(answer.content)["city"] in ("Bern", "Zürich"), answer
