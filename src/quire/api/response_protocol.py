"""Wire models of OpenAI's Responses API, in the manner of `protocol`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from quire.api.protocol import DrawingFields, TextContent, Tools
from quire.http.wire import AnyObject, Boolean, Integer, JsonSchema, Text, Texts, Wire


class ResponsesRequest(DrawingFields):
    """Body of ``/v1/responses``."""

    input: Annotated[str | list[Any], Field(description="a string or a list of items")]
    instructions: Text | None = None
    previous_response_id: Text | None = None
    store: Boolean = True
    metadata: Annotated[dict[str, str] | None, Field(description="an object of strings")] = None
    background: Boolean = False
    include: Texts | None = None
    top_logprobs: Integer | None = None
    tools: Tools | None = None
    tool_choice: Annotated[
        str | dict[str, Any] | None, Field(description="'none', 'auto', 'required' or an object with a type")
    ] = None
    parallel_tool_calls: Boolean = True
    text: AnyObject | None = None
    reasoning: AnyObject | None = None
    max_output_tokens: Annotated[int | None, Field(description="an integer ≥ 1, or null", ge=1)] = None
    user: Text = ""
    chat_template_kwargs: AnyObject | None = None


class Reasoning(Wire):
    """``reasoning``."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class TextSettings(Wire):
    """``text``."""

    format: AnyObject | None = None


class TextFormat(Wire):
    """``text.format``."""

    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    schema_: Annotated[JsonSchema | None, Field(alias="schema")] = None
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

    type: Literal["function"]
    name: Text


class MessageItem(Wire):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextContent


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
    output: TextContent


class ReasoningItem(Wire):
    """Reasoning of an earlier answer."""

    type: Literal["reasoning"]
    summary: TextContent = ""
    content: TextContent = ""
