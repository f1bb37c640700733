"""Wire models of OpenAI's Responses API, in the manner of `protocol`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from quire.api.protocol import Boolean, DeadlineField, Integer, Number, Text, Wire

AnyObject = Annotated[dict[str, Any], Field(description="an object")]
Content = Annotated[str | list[Any], Field(description="a string or a list of text parts")]


class ResponsesRequest(Wire):
    """Body of ``/v1/responses``."""

    model: Text | None = None
    input: Annotated[str | list[Any], Field(description="a string or a list of items")]
    instructions: Text | None = None
    previous_response_id: Text | None = None
    store: Boolean = True
    metadata: Annotated[dict[str, str] | None, Field(description="an object of strings")] = None
    stream: Boolean = False
    background: Boolean = False
    include: Annotated[list[str] | None, Field(description="a list of strings")] = None
    top_logprobs: Integer | None = None
    tools: Annotated[list[Any] | None, Field(description="a list of tools")] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None, Field(description="'none', 'auto', 'required' or an object with a type")
    ] = None
    parallel_tool_calls: Boolean = True
    text: Annotated[dict[str, Any] | None, Field(description="an object")] = None
    reasoning: Annotated[dict[str, Any] | None, Field(description="an object")] = None
    max_output_tokens: Annotated[int | None, Field(description="an integer ≥ 1, or null", ge=1)] = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Integer | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    seed: Integer | None = None
    user: Text = ""
    priority: Integer = 0
    cache_salt: Text = ""
    request_id: Text | None = None
    deadline_ms: DeadlineField | None = None
    timing: Boolean = False
    chat_template_kwargs: Annotated[dict[str, Any] | None, Field(description="an object")] = None


class Reasoning(Wire):
    """``reasoning``."""

    effort: Annotated[
        Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None,
        Field(description="'none', 'minimal', 'low', 'medium', 'high', 'xhigh' or 'max'"),
    ] = None


class TextSettings(Wire):
    """``text``."""

    format: AnyObject | None = None


class TextFormat(Wire):
    """``text.format``."""

    type: Annotated[
        Literal["text", "json_object", "json_schema"],
        Field(description="'text', 'json_object' or 'json_schema'"),
    ]
    name: Text | None = None
    schema_: Annotated[
        dict[str, Any] | None, Field(alias="schema", description="a JSON schema (an object)")
    ] = None
    strict: Boolean | None = None


class FunctionTool(Wire):
    """One of ``tools``."""

    type: Annotated[Literal["function"], Field(description="'function': there are no built-in tools here")]
    name: Text
    description: Text | None = None
    parameters: AnyObject | None = None
    strict: Boolean | None = None


class NamedChoice(Wire):
    """``tool_choice`` as an object."""

    type: Annotated[Literal["function"], Field(description="'function'")]
    name: Text


class MessageItem(Wire):
    """A message."""

    type: Literal["message"] = "message"
    role: Annotated[
        Literal["user", "assistant", "system", "developer"],
        Field(description="'user', 'assistant', 'system' or 'developer'"),
    ]
    content: Content


class CallItem(Wire):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text


class OutputItem(Wire):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Content


class ReasoningItem(Wire):
    """Reasoning of an earlier answer."""

    type: Literal["reasoning"]
    summary: Content = ""
    content: Content = ""


class TextPart(Wire):
    """A part of a content."""

    type: Text
    text: Text
