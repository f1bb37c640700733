"""DSPy over a provider that is registered: calls of a tool over two turns, a streamed answer, typed output."""

from __future__ import annotations

from typing import Literal

import dspy
from check import ANSWER, QUESTION, QUILL, SCRIPTED, STORY, TOOL, check, get_weather
from dspy.lm15 import AccessPolicy, ModelSupport, OpenAIChatCompat, ProviderDefinition, register_provider

# A provider that DSPy does not know: that its models call and keep to schemas has to be said.
register_provider(
    ProviderDefinition.chat(
        AccessPolicy(provider="quire", env_keys=("QUIRE_KEY",), base_url=QUILL + "/v1"),
        compat=OpenAIChatCompat.preset("vllm"),
    ),
    supports=ModelSupport(function_calling=True, response_schema=True),
)


def model(url: str) -> dspy.LM:
    return dspy.LM("quire/quill", api_base=url + "/v1", api_key="none", cache=False, max_tokens=400)


class Ask(dspy.Signature):
    """Answer the question."""

    question: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    calls: dspy.ToolCalls = dspy.OutputField()


class Place(dspy.Signature):
    """Name a city."""

    question: str = dspy.InputField()
    city: Literal["Bern", "Zürich"] = dspy.OutputField()


@check("a native call of a tool")
def _() -> None:
    adapter = dspy.ChatAdapter(use_native_function_calling=True)
    with dspy.context(lm=model(SCRIPTED), adapter=adapter):
        answer = dspy.Predict(Ask)(question=QUESTION, tools=[dspy.Tool(get_weather)])
    (call,) = answer.calls.tool_calls
    assert (call.name, call.args) == ("get_weather", {"city": "Zürich"}), answer


@check("two turns with a tool")
def _() -> None:
    lm, turns = model(SCRIPTED), []
    for _ in range(2):
        turns.append({"role": "user", "content": QUESTION})
        (first,) = lm(messages=turns, tools=[TOOL])
        (call,) = first["tool_calls"]
        turns.append({"role": "assistant", "content": None, "tool_calls": [call.model_dump()]})
        turns.append({"role": "tool", "tool_call_id": call.id, "content": get_weather("Zürich")})
        (last,) = lm(messages=turns, tools=[TOOL])
        text = last if isinstance(last, str) else last["text"]
        assert text == ANSWER, last
        turns.append({"role": "assistant", "content": text})


@check("typed output, by a schema")
def _() -> None:
    with dspy.context(lm=model(QUILL), adapter=dspy.JSONAdapter()):
        assert dspy.Predict(Place)(question=STORY[0]["content"]).city in ("Bern", "Zürich")


@check("a streamed answer")
async def _() -> None:
    with dspy.context(lm=model(QUILL), adapter=dspy.JSONAdapter()):
        program = dspy.streamify(
            dspy.Predict(Place), stream_listeners=[dspy.streaming.StreamListener("city")]
        )
        parts = [part async for part in program(question=STORY[0]["content"])]
    assert parts[-1].city in ("Bern", "Zürich"), parts
