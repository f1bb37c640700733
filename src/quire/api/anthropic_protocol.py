"""Wire models of Anthropic's Messages API, in the manner of `protocol`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from quire.api.protocol import DrawingFields, Tools
from quire.http.wire import AnyObject, Boolean, JsonSchema, Text, Texts, TypedObject, Wire

Content = Annotated[str | list[Any], Field(description="a string or a list of content blocks")]


class AnthropicFields(Wire):
    """What a message and a token count are asked with."""

    model: Text | None = None
    messages: Annotated[list[Any], Field(description="a list of at least one message", min_length=1)]
    system: Annotated[str | list[Any] | None, Field(description="a string or a list of text blocks")] = None
    tools: Tools | None = None
    tool_choice: TypedObject | None = None
    thinking: TypedObject | None = None
    output_config: AnyObject | None = None
    chat_template_kwargs: AnyObject | None = None


class CountTokensRequest(AnthropicFields):
    """Body of ``/v1/messages/count_tokens``."""


class MessagesRequest(AnthropicFields, DrawingFields):
    """Body of ``/v1/messages``."""

    max_tokens: Annotated[int, Field(description="an integer ≥ 1", ge=1)]
    stop_sequences: Texts | None = None
    metadata: AnyObject | None = None


class Metadata(Wire):
    """``metadata``. ``user_id`` names the tenant, as `user` does elsewhere."""

    user_id: Text = ""


class Turn(Wire):
    """One of ``messages``."""

    role: Literal["user", "assistant", "system"]
    content: Content


class TextBlock(Wire):
    """A block of text."""

    type: Literal["text"]
    text: Text


class ThinkingBlock(Wire):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: Text


class ToolUseBlock(Wire):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: AnyObject


class ToolResultBlock(Wire):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: Content = ""


class Thinking(Wire):
    """``thinking``."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int | None, Strict(), Field(description="an integer ≥ 1", ge=1)] = None
    display: Literal["summarized", "omitted"] | None = None


class OutputConfig(Wire):
    """``output_config``."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: AnyObject | None = None


class OutputConfigFormat(Wire):
    """``output_config.format``."""

    type: Literal["json_schema"]
    schema_: Annotated[JsonSchema, Field(alias="schema")]


class ToolChoice(Wire):
    """``tool_choice``."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: Boolean = False


class Tool(Wire):
    """One of ``tools``."""

    type: Annotated[
        Literal["custom"], Field(description="'custom': tools of Anthropic's servers are not here")
    ] = "custom"
    name: Text
    description: Text | None = None
    input_schema: JsonSchema
    strict: Boolean | None = None
